"""The `specwire` command: what each subcommand is told, does and prints."""
