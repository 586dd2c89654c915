"""The `launch` command, its subcommands, and the flags of recipes. Nothing in this package imports torch."""
