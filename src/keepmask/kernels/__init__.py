"""One operation a module: its definition in PyTorch or NumPy, and compiled forms beside it."""
