"""The subcommands of `glm53`: one module each, with `add_parser` and `run`."""
