"""The hicache-obs command, one module per subcommand."""
