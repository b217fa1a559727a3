"""The `specwire` command: options, work and output of each subcommand."""
