"""Command line: `tierckpt` and its subcommands, one folder for each kind."""
