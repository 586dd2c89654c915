"""The command `launch`, its subcommands, and the flags of recipes. Nothing here imports torch."""
