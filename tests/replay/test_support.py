"""`Support` against plain lists of rows."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from replay_cases import score_rows

from keepmask import MaskError, SamplingMask
from keepmask.replay import logprobs_from_logits
from keepmask.replay.support import Support

ROWS = st.lists(st.lists(st.integers(0, 30), max_size=6, unique=True), max_size=8)


def support_of(rows, dtype=torch.int32):
    offsets = torch.tensor([0, *np.cumsum([len(row) for row in rows])], dtype=torch.int64)
    return Support(torch.tensor([i for row in rows for i in row], dtype=dtype), offsets)


def rows_of(support):
    """Of a `Support` or of `Pairs`."""
    bounds = support.offsets.tolist()
    return [support.ids[low:high].tolist() for low, high in pairwise(bounds)]


def assert_ordered_by_id(pairs):
    """`by_id` lists the pairs by id, then row, with the bounds of each id."""
    flat = sorted((i, t) for t, row in enumerate(rows_of(pairs)) for i in row)
    by_id = pairs.by_id
    assert list(zip(pairs.ids[by_id.order].tolist(), by_id.rows.tolist(), strict=True)) == flat
    assert by_id.ids.tolist() == sorted({i for i, _ in flat})
    assert by_id.offsets.diff().tolist() == [sum(i == j for j, _ in flat) for i in by_id.ids.tolist()]


@given(ROWS, st.sampled_from([torch.int32, torch.int64]))
def test_views_say_what_the_rows_say(rows, dtype):
    support = support_of(rows, dtype)
    assert len(support) == support.num_rows == len(rows)
    assert support.num_pairs == sum(map(len, rows))
    assert support.counts.tolist() == [len(row) for row in rows]
    assert support.row_index.tolist() == [t for t, row in enumerate(rows) for _ in row]
    assert support.has_empty_rows == any(not row for row in rows)
    assert_ordered_by_id(support.pairs)
    targets = torch.tensor([[*row, 31][t % (len(row) + 1)] for t, row in enumerate(rows)], dtype=torch.int64)
    for position, target, row in zip(support.target_positions(targets).tolist(), targets.tolist(), rows, strict=True):
        assert (position == -1) == (target not in row)
        assert position == -1 or support.ids[position] == target


@given(ROWS, st.data())
def test_selected_rows_are_those_rows(rows, data):
    support = support_of(rows)
    numbers = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=6)) if rows else []
    assert rows_of(support.select(torch.tensor(numbers, dtype=torch.int64))) == [rows[t] for t in numbers]
    keep = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))), dtype=torch.bool)
    assert rows_of(support.select(keep)) == [row for row, kept in zip(rows, keep.tolist(), strict=True) if kept]


@given(st.lists(ROWS, max_size=4))
def test_concatenated_supports_hold_all_rows(parts):
    assert rows_of(Support.cat([support_of(rows) for rows in parts])) == [row for rows in parts for row in rows]


@given(ROWS, st.booleans(), st.data())
def test_active_rows_hold_more_than_one_id(rows, sort_first, data):
    support = support_of(rows)
    among = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))), dtype=torch.bool)
    if sort_first:
        support.pairs.by_id  # noqa: B018 - then the order of the active rows is filtered out of it
    for mask in (None, among):
        wanted = [t for t, row in enumerate(rows) if len(row) > 1 and (mask is None or mask[t])]
        active = support.active(mask)
        assert active.pairs.rows.tolist() == wanted
        assert rows_of(active.pairs) == [rows[t] for t in wanted]
        assert support.ids[active.numbers].tolist() == active.pairs.ids.tolist()
        assert support.row_index[active.numbers].tolist() == active.pairs.rows[active.pairs.index].tolist()
        assert_ordered_by_id(active.pairs)


@given(ROWS, st.integers(1, 4), st.integers(0, 3))
def test_restricted_pairs_are_those_of_the_range_by_their_place_in_it(rows, step, start):
    pairs, ids = support_of(rows).pairs, range(start, 25, step)
    part, numbers = pairs.restrict(ids)
    assert [[ids[place] for place in row] for row in rows_of(part)] == [[i for i in row if i in ids] for row in rows]
    assert pairs.ids[numbers].tolist() == [ids[place] for place in part.ids.tolist()]


def test_active_rows_are_found_once_until_the_mask_changes():
    support, among = support_of([[1, 2], [3, 4]]), torch.tensor([True, False])
    first = support.active(among)
    assert support.active(among) is first
    among[1] = True
    assert support.active(among).pairs.rows.tolist() == [0, 1]


def test_what_was_made_for_equal_values_is_remembered():
    support, key, made = support_of([[1, 2]]), torch.tensor([1]), []
    make = lambda: made.append(len(made)) or made[-1]  # noqa: E731
    assert support.remember("plan", (key, range(3), "full"), make) == 0
    assert support.remember("plan", (key, range(3), "full"), make) == 0
    assert support.remember("plan", (key, range(4), "full"), make) == 1
    assert support.remember("plan", (key.clone(), range(4), "full"), make) == 1
    assert support.remember("plan", (key.int(), range(4), "full"), make) == 2
    other = object()
    assert support.remember("plan", (key, other, "full"), make) == 3
    assert support.remember("plan", (key, object(), "full"), make) == 4


def by_method(tensor):
    tensor.add_(1)


def by_data(tensor):
    tensor.data += 1


def by_numpy(tensor):
    tensor.numpy()[:] += 1


@pytest.mark.parametrize("write", [by_method, by_data, by_numpy])
def test_targets_written_to_in_any_way_are_scored_as_they_are_now(write):
    support, targets = support_of([[1, 2, 3], [3, 4, 5]]), torch.tensor([1, 3])
    hidden, weight = torch.randn(2, 4), torch.randn(6, 4)
    before = score_rows(hidden, weight, targets, support).logprobs
    write(targets)
    after = score_rows(hidden, weight, targets, support).logprobs
    fresh = score_rows(hidden, weight, torch.tensor([2, 4]), support_of([[1, 2, 3], [3, 4, 5]])).logprobs
    assert torch.equal(after, fresh)
    assert not torch.equal(before, after)


@given(st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=5), st.booleans())
def test_an_id_given_twice_in_a_row_is_found_in_any_order(rows, sort):
    rows = [sorted(row) for row in rows] if sort else rows
    repeating = [t for t, row in enumerate(rows) if len(set(row)) < len(row)]
    support = support_of(rows)
    assert support.has_repeats == bool(repeating)
    targets, scored = torch.zeros(len(rows), dtype=torch.int64), torch.zeros(len(rows), dtype=torch.bool)
    hidden, weight = torch.zeros(len(rows), 2), torch.zeros(6, 2)
    if not repeating:
        score_rows(hidden, weight, targets, support, loss_mask=scored)
        return
    named = f"row{'s' * (len(repeating) > 1)} {', '.join(map(str, repeating))}: an id stands twice"
    for check in (
        lambda: support.check(6),
        lambda: score_rows(hidden, weight, targets, support, loss_mask=scored),
        lambda: logprobs_from_logits(torch.zeros(len(rows), 6), targets, support_of(rows)),
    ):
        with pytest.raises(MaskError, match=named):
            check()


def test_from_mask_takes_the_rows_of_a_sampling_mask():
    mask = SamplingMask.from_lists([[5, 2], [], [7]])
    support = Support.from_mask(mask)
    assert rows_of(support) == [[2, 5], [], [7]]
    assert support.ids.dtype == torch.int32
    assert support.id_bounds == (2, 7)
    assert support.to("cpu") is support


def test_sizes_are_known_without_asking_the_device():
    support = Support.from_mask(SamplingMask.from_lists([[5, 2], [], [7]])).to("meta")  # a device that answers nothing
    assert support.has_empty_rows
    assert not support.has_repeats
    assert support.id_bounds == (2, 7)
    assert support.row_index.shape == (3,)
    assert support.active().pairs.rows.shape == (1,)
    assert support.active().pairs.ids.shape == (2,)
    assert support.select(torch.tensor([2, 0])).ids.shape == (3,)


@pytest.mark.parametrize(
    ("rows", "targets", "message"),
    [
        ([[1, 2], [40]], None, r"row 1: ids must be in \[0, 31\), got 1\.\.40"),
        ([[1, -1], [4]], None, r"row 0: ids must be in \[0, 31\), got -1\.\.4"),
        ([[1, 2], [3, 4, 3], [0, 0]], None, "rows 1, 2: an id stands twice"),
        ([[1, 2], [3]], [1], r"2 rows for targets of shape \[1\].*shard or pad"),
        ([[1, 2], [3], [4], [5]], [1, 4, 4, 6], "rows 1, 3: the target is not in its row"),
        ([[1, 2], []], [1, 31], r"row 1: targets must be in \[0, 31\)"),
        ([[1, 2], []], [-100, 3], r"row 0: targets must be in \[0, 31\)"),
        ([[9]] * 20, [0] * 20, r"rows 0, 1, 2, 3, 4, 5, 6, 7 and 12 more: the target"),
    ],
)
def test_check_names_the_offending_rows(rows, targets, message):
    with pytest.raises(MaskError, match=message):
        support_of(rows).check(31, None if targets is None else torch.tensor(targets))


def test_check_keeps_a_real_id_zero_and_an_empty_row():
    support_of([[0, 3], [], [0]]).check(4, torch.tensor([0, 2, 0]))


@pytest.mark.parametrize("offsets", [[0, 2, 4], [1, 2, 3], [0, 3, 2, 3]])
def test_offsets_that_do_not_add_up_are_refused(offsets):
    support = Support(torch.tensor([1, 2, 3]), torch.tensor(offsets))
    with pytest.raises(MaskError, match="counts and ids do not belong together"):
        support.check(9)


@pytest.mark.parametrize(
    ("ids", "offsets", "message"),
    [
        (torch.tensor([1.0]), torch.tensor([0, 1]), "int32 or int64"),
        (torch.tensor([[1]]), torch.tensor([0, 1]), "flat"),
        (torch.tensor([1]), torch.tensor([0, 1], dtype=torch.int32), "flat int64"),
        (torch.tensor([1]), torch.zeros(0, dtype=torch.int64), r"T \+ 1"),
        (torch.tensor([1]), torch.zeros(2, dtype=torch.int64, device="meta"), "one device"),
    ],
)
def test_tensors_of_other_kinds_are_refused(ids, offsets, message):
    with pytest.raises(MaskError, match=message):
        Support(ids, offsets)


def test_a_selection_of_another_length_is_refused():
    with pytest.raises(MaskError, match="each of the 2 rows"):
        support_of([[1], [2]]).select(torch.tensor([True]))
