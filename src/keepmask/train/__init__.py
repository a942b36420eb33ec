"""Training runs: tasks with verifiable rewards that need no download, and the loop over them."""
