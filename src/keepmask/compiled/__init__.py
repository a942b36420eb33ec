"""How code is compiled for CPUs at run time: numba, torch's threads, vectors, tiles, programs. No operations."""
