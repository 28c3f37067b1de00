"""Command line: `tierckpt` and its subcommands."""
