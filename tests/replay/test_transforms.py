"""Replayed transforms against the sampler's definition, at the pairs and on whole rows."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from replay_cases import PARAMS, Token, random_tokens, score_rows, support_of, transforms_of

import oracle
from keepmask import MaskError
from keepmask.replay.history import LogitBias, TokenHistory
from keepmask.replay.transforms import PairTransforms, TokenTransforms

V = 40


def logits_for(tokens, seed=0):
    return 3 * torch.randn(len(tokens), V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole_rows(tokens, logits):
    """[T, V] float64, by the oracle."""
    return np.stack([oracle.transformed(logits[t].numpy(), k.params, k.prompt, k.output) for t, k in enumerate(tokens)])


@given(st.integers(0, 2**16), st.integers(1, 25))
def test_transforms_at_the_pairs_equal_those_of_whole_rows(seed, num_tokens):
    tokens = random_tokens(np.random.default_rng(seed), num_tokens=num_tokens, vocab_size=V)
    logits, support, transforms = logits_for(tokens, seed), support_of(tokens), transforms_of(tokens)
    want = whole_rows(tokens, logits)
    at_pairs = transforms.at(support.row_index, support.ids).apply(logits[support.row_index, support.ids.long()])
    np.testing.assert_allclose(at_pairs, want[support.row_index, support.ids.long()], rtol=0, atol=1e-5)
    np.testing.assert_allclose(transforms.dense(range(V)).apply(logits), want, rtol=0, atol=1e-5)
    for ids in (range(3, 17), range(1, V, 3)):
        np.testing.assert_allclose(transforms.dense(ids).apply(logits[:, ids]), want[:, ids], rtol=0, atol=1e-5)


@given(st.integers(0, 2**16))
def test_slope_is_the_derivative(seed):
    tokens = random_tokens(np.random.default_rng(seed), num_tokens=8, vocab_size=V, empty=0.0)
    support = support_of(tokens)
    transforms = transforms_of(tokens).at(support.row_index, support.ids)
    logits = logits_for(tokens, seed)[support.row_index, support.ids.long()].requires_grad_()
    (slope,) = torch.autograd.grad(transforms.apply(logits).sum(), logits)
    torch.testing.assert_close(transforms.slope(logits.detach()).double(), slope, rtol=1e-6, atol=0)


def test_a_new_request_counts_earlier_turns_as_prompt():
    # Two turns of one dialogue, ids 0 to 9: in the second, ids of the first repeat but have no output count.
    history = TokenHistory(
        ids=torch.tensor([1, 2, 7, 7, 3, 7, 8]),  # prompt 1 2, output 7 7, tool 3, output 7 8
        offsets=torch.tensor([0, 7]),
        sequences=torch.zeros(4, dtype=torch.int64),
        lengths=torch.tensor([2, 4, 5, 7]),
        starts=torch.tensor([2, 2, 5, 5]),
    )
    rows = torch.arange(4).repeat_interleave(10)
    anywhere, output = history.counts(rows, torch.arange(10).repeat(4))
    assert anywhere.view(4, 10)[:, 7].tolist() == [0, 2, 2, 3]
    assert output.view(4, 10)[:, 7].tolist() == [0, 2, 0, 1]
    assert output.view(4, 10)[:, 1].tolist() == [0, 0, 0, 0]
    assert anywhere.view(4, 10)[:, 8].tolist() == [0, 0, 0, 1]
    for dense, flat in zip(history.dense_counts(range(10)), (anywhere, output), strict=True):
        assert torch.equal(dense.long(), flat.view(4, 10))


def test_sequences_do_not_see_each_other():
    history = TokenHistory(
        ids=torch.tensor([5, 5, 6, 5]),
        offsets=torch.tensor([0, 2, 4]),
        sequences=torch.tensor([0, 1, 1]),
        lengths=torch.tensor([2, 0, 2]),
        starts=torch.tensor([1, 0, 0]),
    )
    anywhere, output = history.counts(torch.arange(3), torch.tensor([5, 5, 5]))
    assert anywhere.tolist() == [2, 0, 1]
    assert output.tolist() == [1, 0, 1]


@given(st.integers(0, 2**16), st.lists(st.integers(0, 6), min_size=1, max_size=4), st.data())
def test_selected_and_concatenated_transforms_are_those_of_the_tokens(seed, sizes, data):
    rng = np.random.default_rng(seed)
    parts = [random_tokens(rng, num_tokens=size, vocab_size=V) for size in sizes]
    tokens = [token for part in parts for token in part]
    support, logits = support_of(tokens), logits_for(tokens, seed)
    values = logits[support.row_index, support.ids.long()]
    want = transforms_of(tokens).at(support.row_index, support.ids).apply(values)
    together = TokenTransforms.cat([transforms_of(part) for part in parts])
    assert torch.equal(together.at(support.row_index, support.ids).apply(values), want)
    rows = torch.tensor(data.draw(st.lists(st.integers(0, len(tokens) - 1), max_size=8)) if tokens else [])
    chosen = support.select(rows.long())
    some = [tokens[t] for t in rows.tolist()]
    values = logits[rows.long()][chosen.row_index, chosen.ids.long()]
    want = transforms_of(some).at(chosen.row_index, chosen.ids).apply(values)
    assert torch.equal(together.select(rows.long()).at(chosen.row_index, chosen.ids).apply(values), want)


def test_concatenation_fills_in_what_changes_nothing():
    plain, cool = TokenTransforms(num_tokens=2), TokenTransforms(num_tokens=1, temperature=torch.tensor([0.5]))
    penalised = transforms_of([Token([1, 2], 1, frequency_penalty=1.0, logit_bias={1: 2.0}, output=[1, 1])])
    together = TokenTransforms.cat([plain, cool, penalised])
    assert together.num_tokens == 4
    assert together.temperature.tolist() == [1.0, 1.0, 0.5, 1.0]
    z = together.at(torch.arange(4), torch.tensor([1, 1, 1, 1])).apply(torch.ones(4))
    assert z.tolist() == [1.0, 1.0, 2.0, 1.0 + 2.0 - 2.0]
    assert TokenTransforms.cat([plain, plain]).history is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": float("nan")}, "row 1: temperature nan: must be positive"),
        ({"temperature": float("inf")}, "row 1: temperature inf"),
        ({"repetition_penalty": -1.0}, "row 1: repetition_penalty -1: must be positive"),
        ({"frequency_penalty": float("nan")}, "row 1: frequency_penalty nan: must be finite"),
        ({"presence_penalty": float("-inf")}, "row 1: presence_penalty -inf: must be finite"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias: must hold numbers below infinity"),
    ],
)
def test_values_that_are_no_numbers_are_refused(changes, message):
    tokens = [Token([1, 2], 1), Token([1, 2], 1, output=[1], **changes)]
    arguments = (torch.zeros(2, 3), torch.zeros(5, 3), torch.tensor([1, 1]), support_of(tokens))
    with pytest.raises(MaskError, match=message):
        score_rows(*arguments, transforms=transforms_of(tokens))


@pytest.mark.parametrize("change", ["temperature", "frequency_penalty", "logit_bias"])
def test_transforms_changed_in_place_are_replayed_as_they_are_now(change):
    tokens = [Token([1, 2], 1, temperature=0.5, frequency_penalty=0.5, logit_bias={1: 1.0}, output=[1])]
    arguments = (torch.ones(1, 3), torch.randn(5, 3), torch.tensor([1]), support_of(tokens))
    transforms = transforms_of(tokens)
    before = score_rows(*arguments, transforms=transforms).logprobs
    (transforms.logit_bias.values if change == "logit_bias" else getattr(transforms, change)).mul_(3)
    after = score_rows(*arguments, transforms=transforms).logprobs
    logits = arguments[1].double().sum(1)
    setattr(tokens[0], change, {1: 3.0} if change == "logit_bias" else 1.5)
    assert after.item() == pytest.approx(tokens[0].transform(logits)[[1, 2]].log_softmax(0)[0].item(), abs=1e-5)
    assert after != before


def test_nothing_to_replay_leaves_logits_alone():
    logits = torch.randn(3)
    transforms = TokenTransforms(num_tokens=2).at(torch.tensor([0, 1, 1]), torch.tensor([1, 2, 3]))
    assert transforms.apply(logits) is logits
    assert transforms.slope(logits) is None
    assert PairTransforms().apply(logits) is logits


@pytest.mark.parametrize("name", [name for name in PARAMS if name != "temperature"])
def test_penalties_without_a_history_are_refused(name):
    with pytest.raises(MaskError, match="give their `history`"):
        TokenTransforms(num_tokens=1, **{name: torch.ones(1)})


def test_parts_of_another_length_are_refused():
    with pytest.raises(MaskError, match="each of the 2 tokens; temperature has 3"):
        TokenTransforms(num_tokens=2, temperature=torch.ones(3))
    with pytest.raises(MaskError, match=r"logit_bias\.requests has 4"):
        TokenTransforms(num_tokens=2, logit_bias=LogitBias.empty(4, torch.device("cpu")))
    with pytest.raises(MaskError, match=r"history\.lengths has 4"):
        TokenTransforms(num_tokens=2, history=TokenHistory.empty(4, torch.device("cpu")))


def test_moved_transforms_are_whole():
    moved = transforms_of([Token([1, 2], 1, output=[1])]).to("meta")
    assert moved.temperature.is_meta
    assert moved.history.ids.is_meta
    assert moved.logit_bias.values.is_meta
    assert moved.num_tokens == 1
