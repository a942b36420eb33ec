"""Packing, against tokens drawn and scored by the oracle under a toy language model written here."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracle
from keepmask import MaskError, SamplingMask, SamplingParams
from keepmask.outputs import CompletionOutput, Logprob, RequestOutput, Rollout, WeightVersionSpan
from keepmask.replay import ReplayBatch, logprobs_from_logits, measure_mismatch

V, E = 40, 12
RNG = np.random.default_rng(7)
EMBED, BEFORE, HEAD = (RNG.normal(size=(V, E)).astype(np.float32) for _ in range(3))

PARAMS = {
    "plain": {},
    "top_p": {"top_p": 0.8},
    "temperature": {"temperature": 0.6, "top_p": 0.9},
    "bias": {"top_k": 6, "logit_bias": {3: 2.0, 11: -1.5}},
    "repetition": {"top_p": 0.9, "repetition_penalty": 1.3},
    "all": {
        "temperature": 0.7,
        "top_p": 0.9,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.3,
        "logit_bias": {2: 1.0},
    },
    "greedy": {"temperature": 0.0},
}


def hidden_states(input_ids, position_ids):
    """The toy model: a token's state depends on it and on the token before it, if any. Flat or [S, L]."""
    previous = torch.roll(input_ids, 1, -1)
    states = torch.tensor(EMBED)[input_ids]
    return states + 0.5 * torch.tensor(BEFORE)[previous] * (position_ids > 0)[..., None]


def next_logits(tokens):
    """The same model for one sequence, in NumPy: the logits after these tokens."""
    state = EMBED[tokens[-1]] + (0.5 * BEFORE[tokens[-2]] if len(tokens) > 1 else 0)
    return (state @ HEAD.T).astype(np.float32)


def draw(prompt, num_tokens, params, seed, processors=(), **fields):
    """A rollout drawn by the oracle, with the log-probabilities of its mask."""
    settings = SamplingParams(**params)
    output, rows, member_logprobs, logprobs = [], [], [], []
    for _ in range(num_tokens):
        logits = next_logits([*prompt, *output])
        step = oracle.step(logits, settings, prompt, output, seed=seed, processors=processors)
        rows.append([] if step.support is None else step.support.tolist())
        member_logprobs.append([] if step.support is None else step.logprobs.tolist())
        logprobs.append(step.logprobs[list(step.ids).index(step.token_id)])
        output.append(step.token_id)
    rollout = Rollout(
        prompt_token_ids=np.array(prompt, np.int32),
        token_ids=np.array(output, np.int32),
        sampling_mask=SamplingMask.from_lists(rows),
        logprobs=np.array(logprobs, np.float32),
        sampling_params=params,
        **fields,
    )
    return rollout, SamplingMask.from_lists(rows, member_logprobs)


def rollouts(params, lengths=(6, 1, 9), **fields):
    return [draw([5, 1 + i, 9][: 1 + i % 3], n, params, seed=i, **fields)[0] for i, n in enumerate(lengths)]


def score(batch, hidden=None, **options):
    hidden = hidden_states(batch.input_ids, batch.position_ids) if hidden is None else hidden
    logits = hidden[batch.logit_positions] @ torch.tensor(HEAD).T
    options = {"transforms": batch.transforms, "loss_mask": batch.loss_mask} | options
    return logprobs_from_logits(logits, batch.targets, batch.support, **options)


# --- what is packed, and where


def test_rows_score_the_drawn_tokens_with_the_logits_before_them():
    batch = ReplayBatch.pack(rollouts({"top_p": 0.8}), vocab_size=V)
    assert batch.lengths == (7, 3, 12)
    assert batch.row_lengths == (6, 1, 9)
    assert batch.cu_seqlens.tolist() == [0, 7, 10, 22]
    assert batch.row_cu_seqlens.tolist() == [0, 6, 7, 16]
    assert batch.position_ids.tolist() == [*range(7), *range(3), *range(12)]
    assert batch.logit_positions.tolist() == [*range(6), 8, *range(12, 21)]
    torch.testing.assert_close(batch.input_ids[batch.logit_positions + 1], batch.targets)
    assert batch.row_sequences.tolist() == [0] * 6 + [1] + [2] * 9
    assert batch.expand(torch.tensor([0.5, -1.0, 2.0])).tolist() == [0.5] * 6 + [-1.0] + [2.0] * 9


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_with_the_engines_weights_the_replayed_ratio_is_one(params):
    batch = ReplayBatch.pack(rollouts(params), vocab_size=V)
    torch.testing.assert_close(score(batch).logprobs, batch.rollout_logprobs, atol=2e-6, rtol=0)


@pytest.mark.parametrize("name", ["temperature", "bias", "repetition", "all"])
def test_a_score_on_the_mask_alone_differs_where_parameters_change_relative_weights(name):
    batch = ReplayBatch.pack(rollouts(PARAMS[name]), vocab_size=V)
    mask_only = score(batch, transforms=None).logprobs
    assert (mask_only - batch.rollout_logprobs).abs().max() > 0.05


@pytest.mark.parametrize("name", ["top_p", "temperature", "all"])
def test_the_full_vocabulary_ratio_is_the_kept_mass(name):
    drawn = rollouts(PARAMS[name])
    batch = ReplayBatch.pack(drawn, vocab_size=V)
    scores = score(batch, full_log_normalizer=True)
    settings = SamplingParams(**PARAMS[name])
    expected = []
    for rollout in drawn:
        prompt, output = rollout.prompt_token_ids.tolist(), rollout.token_ids.tolist()
        for t in range(len(output)):
            logits = next_logits([*prompt, *output[:t]])
            expected.append(oracle.kept_mass(logits, settings, prompt, output[:t], rollout.sampling_mask.row(t)))
    ratio = (scores.full_logprobs - batch.rollout_logprobs).exp()
    np.testing.assert_allclose(ratio, expected, atol=2e-5)
    split = torch.tensor(batch.row_lengths).tolist()
    result = measure_mismatch(
        drawn, [p.numpy() for p in scores.logprobs.split(split)], [p.numpy() for p in scores.full_logprobs.split(split)]
    )
    np.testing.assert_allclose(result.kept_mass, expected, atol=2e-5)
    assert result.table()["ratio_replayed_mean"] == pytest.approx(1, abs=1e-6)
    assert result.table()["ratio_full_mean"] == pytest.approx(np.mean(expected), abs=1e-5)


def test_requests_of_different_parameters_share_a_batch():
    drawn = [draw([5, 2], 4, params, seed)[0] for seed, params in enumerate(PARAMS.values())]
    batch = ReplayBatch.pack(drawn, vocab_size=V)
    torch.testing.assert_close(score(batch).logprobs, batch.rollout_logprobs, atol=2e-6, rtol=0)
    bias = {"logit_bias": {"3": 2.0}}  # as JSON spells it
    assert ReplayBatch.pack([replace(drawn[1], sampling_params=bias)], vocab_size=V).transforms.logit_bias is not None


def test_nothing_to_replay_means_no_transforms():
    transforms = ReplayBatch.pack(rollouts({"top_p": 0.8}), vocab_size=V).transforms
    assert (transforms.temperature, transforms.logit_bias, transforms.history) == (None, None, None)


def test_member_logprobs_are_kept_where_every_mask_has_them():
    pairs = [draw([5, i], 4, {"top_p": 0.9}, seed=i) for i in range(3)]
    with_members = [replace(rollout, sampling_mask=mask) for rollout, mask in pairs]
    batch = ReplayBatch.pack(with_members, vocab_size=V)
    np.testing.assert_allclose(batch.rollout_member_logprobs, np.concatenate([m.logprobs for _, m in pairs]))
    torch.testing.assert_close(score(batch).member_logprobs, batch.rollout_member_logprobs, atol=2e-6, rtol=0)
    assert ReplayBatch.pack([*with_members[:2], pairs[2][0]], vocab_size=V).rollout_member_logprobs is None
    chosen = batch.select_sequences([2, 0])
    expected = np.concatenate([pairs[2][1].logprobs, pairs[0][1].logprobs])
    np.testing.assert_allclose(chosen.rollout_member_logprobs, expected)


def test_a_request_output_stands_for_its_completions():
    (rollout, *_) = rollouts({"top_p": 0.8})
    completion = CompletionOutput(
        index=0,
        text="",
        token_ids=rollout.token_ids.tolist(),
        logprobs=[{int(t): Logprob(float(p))} for t, p in zip(rollout.token_ids, rollout.logprobs, strict=True)],
        sampling_mask=rollout.sampling_mask,
    )
    output = RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=rollout.prompt_token_ids.tolist(),
        outputs=[completion, replace(completion, index=1)],
        finished=True,
        seed=0,
        sampling_params=SamplingParams(top_p=0.8),
    )
    batch = ReplayBatch.pack([output, rollout], vocab_size=V)
    assert batch.row_lengths == (6, 6, 6)
    torch.testing.assert_close(batch.rollout_logprobs[:6], batch.rollout_logprobs[12:])


# --- turns and partial rollouts


def dialogue(params):
    """Generated, tool output, generated again, tool output, generated again: the second and third see all before."""
    tools = [[30, 31, 32], [33]]
    turns, context = [], [5, 9]
    for t in range(3):
        turns.append(draw(context, 4, params, seed=t)[0])
        context = [*context, *turns[-1].token_ids.tolist(), *(tools[t] if t < 2 else [])]
    return turns


@pytest.mark.parametrize("params", [PARAMS["top_p"], PARAMS["all"]])
def test_rows_of_a_dialogue_land_on_its_generated_spans(params):
    turns = dialogue(params)
    batch = ReplayBatch.pack([turns], vocab_size=V)
    assert batch.lengths == (2 + 4 + 3 + 4 + 1 + 4,)
    assert (batch.logit_positions + 1).tolist() == [*range(2, 6), *range(9, 13), *range(14, 18)]
    alone = ReplayBatch.pack(turns, vocab_size=V)
    torch.testing.assert_close(batch.targets, alone.targets)
    torch.testing.assert_close(batch.support.ids, alone.support.ids)
    torch.testing.assert_close(score(batch).logprobs, score(alone).logprobs)
    torch.testing.assert_close(score(batch).logprobs, batch.rollout_logprobs, atol=2e-6, rtol=0)
    tokens = batch.to_tokens(torch.ones(batch.num_rows))
    assert tokens.nonzero()[:, 0].tolist() == (batch.logit_positions + 1).tolist()


def test_turns_that_do_not_continue_each_other_are_refused_by_name():
    first, second, _ = dialogue(PARAMS["top_p"])
    changed = second.prompt_token_ids.copy()
    changed[4] += 1
    with pytest.raises(MaskError, match=r"rollout 1 turn 0: .* part at position 4"):
        ReplayBatch.pack([first, [first, replace(second, prompt_token_ids=changed)]], vocab_size=V)
    with pytest.raises(MaskError, match=r"rollout 0 turn 0: .* part at position 2"):
        ReplayBatch.pack([[second, first]], vocab_size=V)


@pytest.mark.parametrize("params", [PARAMS["top_p"], PARAMS["all"]])
def test_a_partial_rollout_resumed_under_new_weights_keeps_its_spans(params):
    first = draw([5, 9], 3, params, 0, weight_versions=(WeightVersionSpan(0, 3, "7"),))[0]
    prompt = [5, 9, *first.token_ids.tolist()]
    spans = (WeightVersionSpan(0, 1, "8"), WeightVersionSpan(1, 4, "9"))
    resumed = draw(prompt, 4, params, 1, weight_versions=spans)[0]
    batch = ReplayBatch.pack([[first, resumed], rollouts({"top_p": 0.8})[0]], vocab_size=V)
    named = [batch.versions[v] if v >= 0 else None for v in batch.row_versions.tolist()]
    assert named == ["7"] * 3 + ["8"] + ["9"] * 3 + [None] * 6
    torch.testing.assert_close(score(batch).logprobs, batch.rollout_logprobs, atol=2e-6, rtol=0)


@pytest.mark.parametrize("spans", [[(0, 2)], [(0, 3), (2, 6)], [(0, 3), (4, 6)], [(1, 6)], [(3, 6), (0, 3)]])
def test_version_spans_with_gaps_or_overlaps_are_refused(spans):
    (rollout, *_) = rollouts({"top_p": 0.8})
    versions = tuple(WeightVersionSpan(start, end, "1") for start, end in spans)
    with pytest.raises(MaskError, match=r"weight_versions: .* rollout 0"):
        ReplayBatch.pack([replace(rollout, weight_versions=versions)], vocab_size=V)


def test_an_appended_eos_is_read_but_never_trained_and_a_sampled_one_is():
    first, _, third = rollouts({"top_p": 0.8})
    eos = 0
    sampled = replace(
        first,
        token_ids=np.append(first.token_ids, eos).astype(np.int32),
        sampling_mask=SamplingMask.concat([first.sampling_mask, SamplingMask.from_lists([[eos, 4]])]),
        logprobs=np.append(first.logprobs, np.float32(-0.7)),
    )
    batch = ReplayBatch.pack([sampled, third], vocab_size=V, appended_token_ids=[[], [eos]])
    assert batch.input_ids[batch.cu_seqlens[2] - 1] == eos
    assert batch.lengths == (8, 13)
    assert batch.row_lengths == (7, 9)  # the sampled one has its row, the appended one none
    assert batch.targets[6] == eos
    assert batch.rollout_logprobs[6] == np.float32(-0.7)
    appended = replace(third, token_ids=np.append(third.token_ids, eos).astype(np.int32))
    with pytest.raises(MaskError, match=r"appended_token_ids. Other counts in rollout 1 \(9 rows for 10 tokens\)"):
        ReplayBatch.pack([first, appended], vocab_size=V)


def test_loss_masks_keep_drawn_tokens_out_of_the_loss():
    turns = dialogue(PARAMS["top_p"])
    forced = [1, 1, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0]
    batch = ReplayBatch.pack([turns, turns[0]], vocab_size=V, loss_masks=[forced, np.ones(4)])
    assert batch.loss_mask.tolist() == [bool(flag) for flag in forced] + [True] * 4
    assert not score(batch).logprobs[~batch.loss_mask].any()
    with pytest.raises(MaskError, match=r"loss_masks: shape \[3\] for rollout 1, which has 4 drawn tokens"):
        ReplayBatch.pack([turns, turns[0]], vocab_size=V, loss_masks=[forced, [1, 1, 1]])


# --- the same numbers in every form


@pytest.fixture(scope="module")
def whole():
    drawn = [dialogue(PARAMS["all"]), *rollouts(PARAMS["temperature"]), rollouts(PARAMS["plain"])[2]]
    return ReplayBatch.pack(drawn, vocab_size=V, pad_to_multiple_of=8)


def test_padded_tokens_give_the_rows_of_packed_ones(whole):
    padded = whole.padded(pad_token_id=1)
    assert padded.input_ids.shape == (5, 24)
    assert padded.attention_mask.sum(1).tolist() == list(whole.lengths)
    hidden = hidden_states(padded.input_ids, padded.position_ids).flatten(0, 1)
    logits = hidden[padded.logit_positions] @ torch.tensor(HEAD).T
    scores = logprobs_from_logits(logits, whole.targets, whole.support, transforms=whole.transforms)
    torch.testing.assert_close(scores.logprobs, score(whole).logprobs)
    tokens = padded.to_tokens(whole.targets.float(), fill=-1.0)
    drawn = tokens >= 0
    torch.testing.assert_close(padded.input_ids[drawn], tokens[drawn].long())
    assert drawn.sum() == whole.num_rows


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_shards_hold_every_token_and_row_once_and_score_the_same(whole, world_size, layout):
    everywhere = hidden_states(whole.input_ids, whole.position_ids)
    logprobs, tokens, rows = torch.full((whole.num_rows,), torch.nan), [], []
    for rank in range(world_size):
        part = getattr(whole, f"shard_{layout}")(rank, world_size)
        torch.testing.assert_close(part.batch.input_ids, whole.input_ids[part.tokens])
        assert part.batch.num_tokens == whole.num_tokens // world_size
        logprobs[part.rows] = score(part.batch, hidden=everywhere[part.tokens]).logprobs
        tokens.append(part.tokens)
        rows.append(part.rows)
    assert torch.cat(tokens).sort().values.tolist() == list(range(whole.num_tokens))
    assert torch.cat(rows).sort().values.tolist() == list(range(whole.num_rows))
    torch.testing.assert_close(logprobs, score(whole).logprobs)


def test_zigzag_gives_each_rank_an_early_and_a_late_piece_of_every_sequence(whole):
    part = whole.shard_zigzag(1, 2)
    start = 0
    expected = []
    for length in whole.lengths:
        piece = length // 4
        expected += [*range(start + piece, start + 2 * piece), *range(start + 2 * piece, start + 3 * piece)]
        start += length
    assert part.tokens.tolist() == expected


def test_micro_batches_of_whole_sequences_score_the_same(whole):
    parts = whole.split(32)
    assert [part.lengths for part in parts] == [(24, 8), (8, 16), (16,)]
    torch.testing.assert_close(torch.cat([score(part).logprobs for part in parts]), score(whole).logprobs)
    with pytest.raises(MaskError, match="max_tokens=16: sequence 0 alone has 24 tokens"):
        whole.split(16)


def test_selected_rows_score_the_same_and_the_tokens_stay(whole):
    keep = whole.expand(torch.tensor([1, 0, 1, 0, 1])).bool() & (torch.arange(whole.num_rows) % 3 > 0)
    part = whole.select_rows(keep)
    assert part.num_tokens == whole.num_tokens
    assert sum(part.row_lengths) == part.num_rows == int(keep.sum())
    torch.testing.assert_close(part.row_sequences, whole.row_sequences[keep])
    torch.testing.assert_close(score(part).logprobs, score(whole).logprobs[keep])


def test_selected_sequences_come_in_the_order_asked_for(whole):
    part = whole.select_sequences([3, 0])
    assert part.lengths == (16, 24)
    expected = torch.cat([score(whole).logprobs[whole.row_sequences == s] for s in (3, 0)])
    torch.testing.assert_close(score(part).logprobs, expected)
    with pytest.raises(MaskError, match="select_sequences: 5"):
        whole.select_sequences([5])


def test_a_moved_batch_is_the_same_batch(whole):
    assert score(whole.to("cpu")).logprobs.equal(score(whole).logprobs)
    assert whole.to("meta").support.ids.device.type == "meta"


def test_values_of_a_shard_cannot_be_put_at_tokens_it_may_not_hold(whole):
    part = whole.shard_contiguous(0, 2).batch
    with pytest.raises(MaskError, match="this is one shard"):
        part.to_tokens(torch.zeros(part.num_rows))


def test_lengths_that_do_not_split_are_refused():
    batch = ReplayBatch.pack(rollouts({"top_p": 0.8}), vocab_size=V)
    with pytest.raises(MaskError, match="22 tokens do not split over 4 ranks"):
        batch.shard_contiguous(0, 4)
    with pytest.raises(MaskError, match=r"sequence 0 of 7 tokens .* pad_to_multiple_of=4"):
        batch.shard_zigzag(0, 2)
    with pytest.raises(MaskError, match="rank=2"):
        batch.shard_contiguous(2, 2)


def test_labels_sharded_without_their_rows_are_refused_before_any_forward(whole):
    half = whole.num_rows // 2
    with pytest.raises(MaskError, match=rf"targets has {half}, not {whole.num_rows}"):
        replace(whole, targets=whole.targets[:half])
    logits = torch.zeros(half, V)
    with pytest.raises(MaskError, match=rf"{whole.num_rows} rows for {half} targets"):
        logprobs_from_logits(logits, whole.targets[:half], whole.support)


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=3), max_size=4),
    st.integers(1, 8),
    st.randoms(use_true_random=False),
)
def test_every_drawn_token_has_its_row_and_no_other_token_has_one(shapes, multiple, random):
    """shapes: for each trajectory, for each turn, how many tokens come before it and how many it draws."""
    trajectories, expected_tokens, drawn_at = [], [], []
    for shape in shapes:
        context = [random.randrange(V)]
        turns = []
        for before, drawn in shape:
            context = context + [random.randrange(V) for _ in range(before)]
            output = [random.randrange(V) for _ in range(drawn)]
            rows = [sorted({token, *random.sample(range(V), 3)}) for token in output]
            turns.append(
                Rollout(
                    prompt_token_ids=np.array(context, np.int32),
                    token_ids=np.array(output, np.int32),
                    sampling_mask=SamplingMask.from_lists(rows),
                )
            )
            start = len(expected_tokens) + len(context)
            drawn_at += [(start + i, output[i], rows[i]) for i in range(drawn)]
            context = context + output
        padding = -len(context) % multiple
        expected_tokens += [*context, *[0] * padding]
        trajectories.append(turns)
    batch = ReplayBatch.pack(trajectories, vocab_size=V, pad_to_multiple_of=multiple)
    assert batch.input_ids.tolist() == expected_tokens
    assert batch.rollout_logprobs is None
    assert [(p + 1, t) for p, t in zip(batch.logit_positions.tolist(), batch.targets.tolist(), strict=True)] == [
        (position, token) for position, token, _ in drawn_at
    ]
    assert batch.support.ids.tolist() == [token_id for *_, row in drawn_at for token_id in row]
    for sequence in range(batch.num_sequences):
        part = batch.select_sequences([sequence])
        torch.testing.assert_close(part.input_ids[part.logit_positions + 1], part.targets)


# --- what cannot be replayed


def one(**changes):
    (rollout, *_) = rollouts({"top_p": 0.8})
    return replace(rollout, **changes)


def with_row(rollout, t, row):
    rows = rollout.sampling_mask.token_ids
    return replace(rollout, sampling_mask=SamplingMask.from_lists([*rows[:t], row, *rows[t + 1 :]]))


def test_offending_rows_are_all_listed_by_rollout_and_position():
    good, bad = one(), one()
    outside = [next(i for i in range(V) if i != token) for token in bad.token_ids]
    broken = with_row(with_row(bad, 2, [outside[2]]), 5, [outside[5]])
    with pytest.raises(
        MaskError, match=r"drawn token is not in its row.* at rollout 1 position 2, rollout 1 position 5"
    ):
        ReplayBatch.pack([good, broken], vocab_size=V)


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        (one(prompt_token_ids=np.zeros(0, np.int32)), "prompt_token_ids: .* empty in rollout 1"),
        (one(prompt_token_ids=np.array([V], np.int32)), "prompt_token_ids: ids must be in .* rollout 1 position 0"),
        (one(prompt_token_ids=np.array([0.5])), "rollout 1: prompt_token_ids must be a flat integer array"),
        (
            one(token_ids=np.array([1, 2, V, 4, 5, -1], np.int32)),
            "token_ids: .* rollout 1 position 2, rollout 1 position 5",
        ),
        (
            with_row(one(), 3, [*range(V + 1)]),
            r"sampling_mask: ids must be in \[0, 40\); not so at rollout 1 position 3",
        ),
        (one(sampling_mask=one().sampling_mask[:4]), r"sampling_mask: .* rollout 1 \(4 rows for 6 tokens\)"),
        (one(sampling_mask=None), "rollout 1: no sampling_mask"),
        (one(logprobs=np.zeros(3, np.float32)), r"logprobs: .* rollout 1 \(3 for 6 tokens\)"),
        (one(logprobs=np.full(6, np.nan, np.float32)), "logprobs: must be finite.* rollout 1 position 0"),
        (one(logprobs=np.full(6, 0.5, np.float32)), "logprobs: must be finite and at most 0"),
        (one(logprobs=None), "logprobs: given for some rollouts and absent in rollout 1"),
        (one(sampling_params={"sampling_mask_mode": "bounded"}), "bounded mode.* rollout 1"),
        (one(sampling_params={"temperature": 0.0}), "temperature: below 1e-5 .* rollout 1 position 1"),
        (one(sampling_params={"logit_bias": {V: 1.0}}), "rollout 1: logit_bias of id 40"),
        (one(sampling_params={"logit_bias": {3: np.nan}}), "rollout 1: logit_bias of id 3 is nan"),
        (one(sampling_params={"logit_bias": {"x": 1.0}}), "rollout 1: logit_bias must map token ids to numbers"),
        (one(sampling_params={"logit_bias": [1, 2]}), "rollout 1: logit_bias must map token ids to numbers"),
        (one(sampling_params={"temperature": "0.7"}), "rollout 1: temperature='0.7' must be a finite number"),
        (one(sampling_params={"frequency_penalty": np.inf}), "rollout 1: frequency_penalty=inf must be a finite"),
        (one(sampling_params={"repetition_penalty": 0}), "rollout 1: repetition_penalty=0 must be positive"),
        (one(sampling_params=None), "rollout 1: sampling_params must be a mapping"),
        (one(sampling_mask=[[1]] * 6), "rollout 1: sampling_mask must be a SamplingMask, got list"),
        ({"token_ids": [1]}, "rollout 1: a dict without prompt_token_ids, .* is no rollout"),
        (None, "rollout 1: a NoneType without"),
    ],
)
def test_what_cannot_be_replayed_is_refused_by_rollout(rollout, message):
    with pytest.raises(MaskError, match=message):
        ReplayBatch.pack([one(), rollout], vocab_size=V)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 0}, "vocab_size=0: must be"),
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of=0: must be >= 1"),
        ({"pad_token_id": V}, r"pad_token_id=40: must be in \[0, 40\)"),
        ({"missing_mask": "maybe"}, "missing_mask='maybe': must be one of error, full"),
        ({"logprobs_mode": "raw"}, "logprobs_mode='raw': must be one of"),
        ({"appended_token_ids": [[0.5]]}, "appended_token_ids: those of rollout 0 must be a flat integer array"),
        ({"appended_token_ids": [3]}, "appended_token_ids: those of rollout 0 must be a flat integer array"),
        ({"appended_token_ids": [[V]]}, r"appended_token_ids: ids must be in \[0, 40\); not so for rollout 0"),
        ({"appended_token_ids": [[], []]}, "appended_token_ids: 2 lists for 1 trajectories"),
        ({"loss_masks": [[0.5] * 6]}, "loss_masks: those of rollout 0 must be 0 or 1"),
        ({"loss_masks": [["a"] * 6]}, "loss_masks: those of rollout 0 must be 0 or 1"),
        ({"loss_masks": [[np.nan] * 6]}, "loss_masks: those of rollout 0 must be 0 or 1"),
        ({"loss_masks": []}, "loss_masks: 0 masks for 1 trajectories"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(MaskError, match=message):
        ReplayBatch.pack([one()], **{"vocab_size": V} | options)


def test_parameters_may_come_as_an_object_and_versions_as_numbers():
    spans = (WeightVersionSpan(0, 6, 7),)
    rollout = one(sampling_params=SamplingParams(temperature=0.5, top_p=0.8), weight_versions=spans, logprobs=None)
    batch = ReplayBatch.pack([rollout], vocab_size=V)
    assert batch.transforms.temperature.tolist() == [0.5] * 6
    assert batch.versions == ("7",)


def test_raw_logprobs_of_whole_vocabulary_rows_are_those_of_the_support():
    rollout, _ = draw([5, 9], 5, {}, seed=0)
    raw = replace(rollout, logprobs=raw_logprobs(rollout))
    batch = ReplayBatch.pack([raw], vocab_size=V, logprobs_mode="raw_logprobs")
    torch.testing.assert_close(score(batch).logprobs, batch.rollout_logprobs, atol=2e-6, rtol=0)


def test_a_mask_whose_recorded_probabilities_do_not_add_up_is_a_cut_one():
    rollout, mask = draw([5], 6, {"top_p": 0.9}, seed=0)
    t = int(mask.counts.argmax())
    kept = [i for i in mask.row(t).tolist() if i == rollout.token_ids[t] or i != mask.row(t)[0]]
    rows, logprobs = mask.token_ids, [mask.row_logprobs(i).tolist() for i in range(6)]
    logprobs[t] = [p for i, p in zip(rows[t], logprobs[t], strict=True) if i in kept][:-1]
    rows[t] = kept[:-1]
    rows[t], logprobs[t] = [int(rollout.token_ids[t]), rows[t][0]], [-2.0, -2.0]
    cut = SamplingMask.from_lists(rows, logprobs)
    with pytest.raises(MaskError, match=rf"do not add up to 1.* at rollout 0 position {t}"):
        ReplayBatch.pack([replace(rollout, sampling_mask=cut, logprobs=None)], vocab_size=V)


def test_a_real_id_zero_stays_in_its_row():
    rollout = with_row(one(), 0, sorted({0, 7, int(one().token_ids[0])}))
    batch = ReplayBatch.pack([replace(rollout, logprobs=None)], vocab_size=V)
    assert 0 in batch.support.ids[: batch.support.offsets[1]].tolist()


def raw_logprobs(rollout):
    prompt, output = rollout.prompt_token_ids.tolist(), rollout.token_ids.tolist()
    rows = [oracle.log_softmax(next_logits([*prompt, *output[:t]])) for t in range(len(output))]
    return np.array([row[token] for row, token in zip(rows, output, strict=True)], np.float32)


@pytest.mark.parametrize("params", [{"temperature": 0.6, "top_p": 0.5}, {"temperature": 0.6}])
def test_raw_logprobs_are_refused_or_replaced_by_the_masks_own_and_never_give_a_silent_ratio(params):
    rollout, mask = draw([5, 9], 12, params, seed=0)
    raw = replace(rollout, logprobs=raw_logprobs(rollout))
    with pytest.raises(MaskError, match=r"rollout 0: raw log-probabilities .* have no ratio to replayed ones"):
        ReplayBatch.pack([raw], vocab_size=V, logprobs_mode="raw_logprobs")
    if "top_p" not in params:  # whole-vocabulary rows, so a rollout without a mask is the same
        with pytest.raises(MaskError, match="say which with logprobs_mode"):
            ReplayBatch.pack([replace(raw, sampling_mask=None)], vocab_size=V, missing_mask="full")
        return
    with pytest.raises(MaskError, match="a token alone in its row has log-probability 0"):
        ReplayBatch.pack([raw], vocab_size=V)
    with_members = replace(raw, sampling_mask=mask)
    wide = replace(with_members, logprobs=np.where(mask.counts == 1, 0, raw.logprobs).astype(np.float32))
    with pytest.raises(MaskError, match="differ from the mask's own log-probabilities"):
        ReplayBatch.pack([wide], vocab_size=V)
    batch = ReplayBatch.pack([with_members], vocab_size=V, logprobs_mode="raw_logprobs")
    torch.testing.assert_close(score(batch).logprobs, batch.rollout_logprobs, atol=2e-6, rtol=0)


def test_a_mask_with_logprobs_gives_those_of_the_drawn_tokens():
    rollout, mask = draw([5, 9], 8, {"top_p": 0.9}, seed=0)
    batch = ReplayBatch.pack([replace(rollout, sampling_mask=mask, logprobs=None)], vocab_size=V)
    np.testing.assert_allclose(batch.rollout_logprobs, rollout.logprobs, atol=1e-6)


def test_a_rollout_without_a_mask_is_the_whole_vocabulary_only_when_said_so():
    rollout, _ = draw([5, 9], 5, {}, seed=0)
    bare = replace(rollout, sampling_mask=None)
    batch = ReplayBatch.pack([bare], vocab_size=V, missing_mask="full")
    assert batch.support.counts.tolist() == [0] * 5
    torch.testing.assert_close(score(batch).logprobs, batch.rollout_logprobs, atol=2e-6, rtol=0)
    for dropped in ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"allowed_token_ids": [1, 2]}, {"bad_words": ["x"]}):
        with pytest.raises(MaskError, match="dropped ids, but there is no sampling_mask"):
            ReplayBatch.pack([replace(bare, sampling_params=dropped)], vocab_size=V, missing_mask="full")
    ReplayBatch.pack([replace(bare, sampling_params={"top_k": -1, "top_p": 1.0})], vocab_size=V, missing_mask="full")


def test_an_empty_row_is_the_whole_vocabulary_and_a_singleton_is_exactly_zero():
    logits = torch.randn(3, V, requires_grad=True)
    rollout = Rollout(
        prompt_token_ids=np.array([1], np.int32),
        token_ids=np.array([3, 4, 5], np.int32),
        sampling_mask=SamplingMask.from_lists([[], [4], [5, 6]]),
    )
    batch = ReplayBatch.pack([rollout], vocab_size=V)
    scores = logprobs_from_logits(logits, batch.targets, batch.support, transforms=batch.transforms)
    assert scores.logprobs[0].item() == pytest.approx(logits[0].log_softmax(0)[3].item(), abs=1e-6)
    assert scores.logprobs[1] == 0
    scores.logprobs.sum().backward()
    assert not logits.grad[1].any()
    assert logits.grad.isfinite().all()


def test_sequences_without_drawn_tokens_and_empty_batches_are_fine():
    nothing = one(
        token_ids=np.zeros(0, np.int32), sampling_mask=SamplingMask([], [0]), logprobs=np.zeros(0, np.float32)
    )
    batch = ReplayBatch.pack([nothing, one()], vocab_size=V)
    assert batch.row_lengths == (0, 6)
    assert score(batch).logprobs.isfinite().all()
    empty = ReplayBatch.pack([], vocab_size=V)
    assert (empty.num_tokens, empty.num_rows, empty.num_sequences) == (0, 0, 0)
    assert empty.split(5) == []
    assert score(ReplayBatch.pack([nothing], vocab_size=V)).logprobs.numel() == 0


# --- custom processors


class Ban:
    """Bans an id: survivors keep their weights."""

    preserves_relative_weights = True

    def __call__(self, z):
        z = z.copy()
        z[7] = -np.inf
        return z


class Watermark:
    """Adds to ids by a rule of the last token, as green-list watermarks do."""

    preserves_relative_weights = False

    def __init__(self, sequence=None):
        self.sequence = sequence

    def replay(self, logits, ids, context):
        last = [*context.prompt_token_ids, *context.output_token_ids][-1]
        return logits + 1.5 * ((ids + last) % 2 == 0)


class Sharpen:
    """Doubles logits: what it changes depends on them."""

    preserves_relative_weights = False

    def replay(self, logits, ids, context):
        return 2 * logits


class Silent:
    preserves_relative_weights = False


def watermarked(params):
    prompt, output = [5, 9], []

    def processor(z):
        return (z + 1.5 * ((np.arange(V) + [*prompt, *output][-1]) % 2 == 0)).astype(np.float32)

    settings, rows, logprobs = SamplingParams(**params), [], []
    for _ in range(8):
        step = oracle.step(next_logits([*prompt, *output]), settings, prompt, output, seed=3, processors=[processor])
        rows.append(step.ids.tolist())
        logprobs.append(step.logprobs[list(step.ids).index(step.token_id)])
        output.append(step.token_id)
    return Rollout(
        prompt_token_ids=np.array(prompt, np.int32),
        token_ids=np.array(output, np.int32),
        sampling_mask=SamplingMask.from_lists(rows),
        logprobs=np.array(logprobs, np.float32),
        sampling_params=params,
    )


def test_a_processor_that_only_bans_needs_no_replay():
    rollout, _ = draw([5, 9], 8, {"top_p": 0.9}, seed=0, processors=[Ban()])
    batch = ReplayBatch.pack([rollout], vocab_size=V, processors=[Ban()])
    torch.testing.assert_close(score(batch).logprobs, batch.rollout_logprobs, atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7, "top_p": 0.95},
        {"top_k": 9, "frequency_penalty": 0.5, "presence_penalty": 0.2, "logit_bias": {4: 1.0}},
    ],
)
def test_a_processor_that_adds_to_logits_is_replayed_exactly(params):
    rollout = watermarked(params)
    plain = ReplayBatch.pack([rollout], vocab_size=V)
    assert (score(plain).logprobs - plain.rollout_logprobs).abs().max() > 0.05
    batch = ReplayBatch.pack([rollout], vocab_size=V, processors=[Ban(), Watermark()])
    torch.testing.assert_close(score(batch).logprobs, batch.rollout_logprobs, atol=2e-6, rtol=0)
    part = batch.select_rows(torch.arange(8) % 2 == 1)
    torch.testing.assert_close(score(part).logprobs, score(batch).logprobs[1::2])


@pytest.mark.parametrize(
    ("processors", "params", "message"),
    [
        ([Silent()], {}, "processors: Silent changes the survivors' relative weights; it needs a replay"),
        ([object()], {}, "processors: object.preserves_relative_weights must be True or False, got None"),
        ([Sharpen()], {}, "Sharpen.replay changes logits by amounts that depend on them, at rollout 0 position"),
        ([Watermark()], {"repetition_penalty": 1.2}, "Watermark acts after the repetition penalty of rollout 0"),
        ([], {"custom_logit_processor": "dill bytes"}, "rollout 0: sampling_params has custom_logit_processor"),
        ([], {"logits_processors": ["mine"]}, "rollout 0: sampling_params has logits_processors"),
    ],
)
def test_processors_that_cannot_be_replayed_are_refused_by_name(processors, params, message):
    rollout, _ = draw([5, 9], 8, {"top_p": 0.95}, seed=0)
    with pytest.raises(MaskError, match=message):
        ReplayBatch.pack([replace(rollout, sampling_params=params)], vocab_size=V, processors=processors)
