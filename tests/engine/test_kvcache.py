from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepmask.engine.kvcache import BlockPool, prefix_hashes

actions = st.lists(
    st.tuples(st.sampled_from(["take", "share", "release", "register", "forget_all"]), st.integers(0, 10**6)),
    max_size=60,
)


@given(st.integers(1, 6), actions)
def test_references_add_up_and_a_found_block_still_holds_what_was_registered(num_blocks, steps):
    pool = BlockPool(num_blocks, 4)
    held, content = Counter(), {}  # block -> references; block -> the hash it was registered under
    for action, choice in steps:
        owned = sorted(held.elements())
        if action == "take" and pool.num_free:
            after, room = choice % num_blocks, choice // num_blocks % 4
            (block,) = pool.take(1, after=after, room=room) if choice % 2 else pool.take(1)
            assert not held[block]
            held[block] = 1
            content.pop(block, None)
        elif action == "share" and content:
            block = sorted(content)[choice % len(content)]
            assert pool.find([content[block]]) == [block]
            pool.share([block])
            held[block] += 1
        elif action == "release" and owned:
            block = owned[choice % len(owned)]
            pool.release([block])
            held[block] -= 1
        elif action == "register" and owned:
            block, block_hash = owned[choice % len(owned)], bytes([choice % 5])
            pool.register(block, block_hash)
            if block not in content and block_hash not in content.values():
                content[block] = block_hash
        elif action == "forget_all":
            pool.forget_all()
            content.clear()
        assert pool.num_free == num_blocks - sum(1 for count in held.values() if count)
        assert all(pool.is_free(block) == (not held[block]) for block in range(num_blocks))
        for block_hash in map(bytes, ([value] for value in range(5))):
            assert pool.find([block_hash]) == [block for block in content if content[block] == block_hash]
    for block in sorted(held.elements()):
        pool.release([block])
    assert pool.num_free == num_blocks


def test_blocks_without_a_known_prefix_are_used_first_then_those_freed_longest_ago():
    pool = BlockPool(4, 1)
    blocks = pool.take(4)
    for block in blocks[:3]:
        pool.register(block, bytes([block]))
    pool.release(blocks[1:2])
    pool.release([blocks[0], blocks[2]])  # of one sequence: its end is given away before its beginning
    pool.release(blocks[3:])
    assert pool.take(4) == [blocks[3], blocks[1], blocks[2], blocks[0]]


def test_a_sequence_grows_into_its_neighbours_while_there_are_other_blocks():
    pool = BlockPool(12, 1)
    first, second = pool.take(2, room=3), pool.take(1, room=2)
    for _ in range(2):
        first += pool.take(1, after=first[-1])
        second += pool.take(1, after=second[-1])
    assert first == [0, 1, 2, 3]
    assert second == [5, 6, 7]
    assert pool.take(5, after=first[-1]) == [4, 8, 9, 10, 11]


def test_room_is_given_to_others_when_there_is_nothing_else():
    pool = BlockPool(4, 1)
    assert pool.take(1, room=100) == [0]
    assert pool.take(3) == [1, 2, 3]


def test_neighbours_that_are_still_findable_are_kept():
    pool = BlockPool(4, 1)
    first, second, *_ = pool.take(3)
    pool.register(second, b"x")
    pool.release([second])
    assert pool.take(1, after=first) == [3]
    assert pool.find([b"x"]) == [second]


def test_forgetting_everything_puts_the_blocks_in_order_again():
    pool = BlockPool(6, 1)
    blocks = pool.take(6)
    for block in (3, 1):
        pool.register(block, bytes([block]))
    for block in (4, 3, 0, 1, 2):
        pool.release([block])
    pool.forget_all()
    assert pool.take(5) == [0, 1, 2, 3, 4]
    assert blocks == [0, 1, 2, 3, 4, 5]


def test_find_stops_at_the_first_block_that_is_not_there():
    pool = BlockPool(3, 1)
    first, second, third = pool.take(3)
    pool.register(first, b"1")
    pool.register(third, b"3")
    assert pool.find([b"1", b"2", b"3"]) == [first]
    pool.register(second, b"2")
    assert pool.find([b"1", b"2", b"3"]) == [first, second, third]
    assert pool.find([b"2"]) == [second]


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_blocks_for_rounds_up(num_tokens, blocks):
    assert BlockPool(1, 16).blocks_for(num_tokens) == blocks


tokens = st.lists(st.integers(0, 3), max_size=12)


@given(tokens, tokens, st.integers(1, 4))
def test_equal_hashes_mean_equal_prefixes(one, other, block_size):
    mine, theirs = prefix_hashes(one, block_size), prefix_hashes(other, block_size)
    assert len(mine) == len(one) // block_size
    for at, (left, right) in enumerate(zip(mine, theirs, strict=False), start=1):
        assert (left == right) == (one[: at * block_size] == other[: at * block_size])


def test_salts_part_equal_prompts():
    assert not set(prefix_hashes([1, 2], 1, b"a")) & set(prefix_hashes([1, 2], 1, b"b"))
    assert prefix_hashes([1, 2], 1, b"a") == prefix_hashes(np.array([1, 2], np.int32), 1, b"a")
