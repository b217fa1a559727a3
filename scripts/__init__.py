"""Tools of the repository itself; nothing here is installed."""
