"""The engine's benchmark, as `keepmask bench`: python bench/engine.py --json --peer vllm --peer-python PATH."""

import sys

from keepmask.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
