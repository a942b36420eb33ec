"""What the `keepmask` command can do, a module a command. Each has `add_arguments` and `run`."""
