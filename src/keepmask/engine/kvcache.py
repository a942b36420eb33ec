"""`BlockPool`: who owns which block of the KV cache, and which blocks hold a prefix that can be used again."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

__all__ = ["BlockPool", "prefix_hashes"]


_MOST_ROOM = 32  # blocks kept for a sequence: long runs of neighbours, and yet little memory is spread out


class BlockPool:
    """Reference-counted blocks of `block_size` tokens each. Holds no tensors.

    A full block whose content is known can be registered under a hash. When its last owner frees it, it stays
    findable until no other block is free; least recently freed blocks go first. Blocks of a sequence are neighbours
    where possible, because memory is read faster in its order.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        self._empty: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # free, not registered
        self._cached: OrderedDict[int, None] = OrderedDict()  # free and registered
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now, registered ones included."""
        return len(self._empty) + len(self._cached)

    def is_free(self, block: int) -> bool:
        """Whether nobody holds the block."""
        return self._references[block] == 0

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def take(self, count: int, *, after: int | None = None, room: int = 0) -> list[int]:
        """`count` blocks with one reference each; their earlier content is forgotten.

        after: the block that they continue. room: blocks that may be asked for next; the neighbours are left to that as
        long as there are others.
        """
        assert count <= self.num_free
        blocks = []
        for _ in range(count):
            after = self._next(after)
            self._forget(after)
            self._references[after] = 1
            blocks.append(after)
        if after is not None:
            for neighbour in range(after + 1, after + 1 + min(room, _MOST_ROOM)):
                if neighbour in self._empty:
                    self._empty.move_to_end(neighbour)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block, reviving those that lie free."""
        for block in blocks:
            self._references[block] += 1
            self._empty.pop(block, None)
            self._cached.pop(block, None)

    def release(self, blocks: Iterable[int]) -> None:
        """Drop a reference to each block. The last blocks of a sequence are the first to be used again."""
        for block in reversed(list(blocks)):
            self._references[block] -= 1
            assert self._references[block] >= 0
            if self._references[block] == 0:
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._empty[block] = None
                    self._empty.move_to_end(block, last=False)

    def register(self, block: int, block_hash: bytes) -> None:
        """Let the full block be found under its hash; the first block with a hash keeps it."""
        if block_hash not in self._block_of and block not in self._hash_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest run of `hashes` from the start that are still there."""
        found = []
        for block_hash in hashes:
            if (block := self._block_of.get(block_hash)) is None:
                break
            found.append(block)
        return found

    def forget_all(self) -> None:
        """No registered block will be found again (the weights changed)."""
        self._hash_of.clear()
        self._block_of.clear()
        self._empty = OrderedDict.fromkeys(sorted([*self._empty, *self._cached]))
        self._cached.clear()

    def _next(self, after: int | None) -> int:
        """A free block, no longer listed: the neighbour if it is empty, else any empty one, else the least recent."""
        if after is not None and after + 1 in self._empty:
            del self._empty[after + 1]
            return after + 1
        block, _ = (self._empty or self._cached).popitem(last=False)
        return block

    def _forget(self, block: int) -> None:
        if (block_hash := self._hash_of.pop(block, None)) is not None:
            del self._block_of[block_hash]


def prefix_hashes(token_ids: Sequence[int], block_size: int, salt: bytes = b"") -> list[bytes]:
    """SHA-256 of each full block together with all before it, and the salt.

    Equal hashes mean equal token prefixes under equal salts: nobody can craft a prompt that meets another's block.
    """
    ids = np.asarray(token_ids, np.int64)
    parent = hashlib.sha256(salt).digest()
    hashes = []
    for start in range(0, len(ids) - block_size + 1, block_size):
        parent = hashlib.sha256(parent + ids[start : start + block_size].tobytes()).digest()
        hashes.append(parent)
    return hashes
