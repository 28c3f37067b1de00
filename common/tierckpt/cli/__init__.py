"""Command line: `tierckpt` and its subcommands, one module for each kind."""
