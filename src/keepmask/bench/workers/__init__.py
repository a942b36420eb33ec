"""Scripts that run under another engine's Python. They import nothing of keepmask."""
