"""The same rollouts in every program's layout make the same batch, and score the same."""

import base64
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_replay_batch import V, draw, score

from keepmask.replay import ReplayBatch
from keepmask.wire import peers
from keepmask.wire.rollout_file import read_rollouts, write_rollouts

PARAMS = {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.3, "presence_penalty": 0.2, "logit_bias": {2: 1.0}}


@pytest.fixture(scope="module")
def turns():
    """A dialogue of two turns with a tool's answer between them, drawn by the oracle, masks with log-probabilities."""
    first, mask = draw([5, 9], 6, PARAMS, seed=0, request_id="0")
    first = replace(first, sampling_mask=mask)
    second, mask = draw([5, 9, *first.token_ids.tolist(), 30, 31], 5, PARAMS, seed=1, request_id="1")
    return [first, replace(second, sampling_mask=mask)]


def by_weight(rollout):
    """Ids and log-probabilities of each row, most likely first, the way SGLang and SkyRL order them."""
    mask = rollout.sampling_mask
    orders = [np.argsort(-mask.row_logprobs(t), kind="stable") for t in range(len(mask))]
    ids = [mask.row(t)[order].tolist() for t, order in enumerate(orders)]
    return ids, [mask.row_logprobs(t)[order].tolist() for t, order in enumerate(orders)]


def as_vllm(rollout):
    mask = rollout.sampling_mask
    content = [
        {"token": f"token_id:{t}", "logprob": float(p)}
        for t, p in zip(rollout.token_ids, rollout.logprobs, strict=True)
    ]
    choice = {
        "index": 0,
        "token_ids": rollout.token_ids.tolist(),
        "sampling_mask": mask.token_ids,
        "sampling_mask_logprobs": [mask.row_logprobs(t).tolist() for t in range(len(mask))],
        "logprobs": {"content": content},
        "finish_reason": "length",
    }
    answer = {"request_id": "a", "prompt_token_ids": rollout.prompt_token_ids.tolist(), "choices": [choice]}
    return peers.rollouts_from_vllm(json.loads(json.dumps(answer)), sampling_params=PARAMS)


def as_sglang(rollout):
    ids, logprobs = by_weight(rollout)
    meta = {"id": "a", "output_token_sampling_mask": ids, "output_token_sampling_logprobs": logprobs}
    answer = {"output_ids": rollout.token_ids.tolist(), "meta_info": meta}
    return peers.rollouts_from_sglang(
        json.loads(json.dumps(answer)), prompt_token_ids=rollout.prompt_token_ids, sampling_params=PARAMS
    )


def flat(turns, mask):
    """The dialogue as one sequence with flags of its sampled tokens: verifiers, slime, miles and SkyRL keep it so."""
    last = turns[-1]
    tokens = [*last.prompt_token_ids.tolist(), *last.token_ids.tolist()]
    sampled = np.zeros(len(tokens), bool)
    for turn in turns:
        start = turn.prompt_token_ids.size
        sampled[start : start + turn.token_ids.size] = True
    logprobs = np.zeros(len(tokens), np.float32)
    logprobs[sampled] = np.concatenate([turn.logprobs for turn in turns])
    return peers.rollouts_from_flat(tokens, sampled, mask(sampled), logprobs=logprobs, sampling_params=PARAMS)


def csr(turns):
    counts = np.concatenate([turn.sampling_mask.counts for turn in turns])
    ids = np.concatenate([turn.sampling_mask.ids for turn in turns])
    return ids, counts, np.concatenate([turn.sampling_mask.logprobs for turn in turns])


def as_verifiers(turns):
    ids, counts, _ = csr(turns)

    def mask(sampled):
        branch = np.zeros(sampled.size, np.int32)
        branch[sampled] = counts
        return peers.from_verifiers(SimpleNamespace(ids=ids, counts=branch), sampled=sampled)

    return flat(turns, mask)


def as_prime_rl(turns):
    ids, counts, logprobs = csr(turns)
    packed = {"ids": ids.astype("<i4").tobytes(), "counts": counts.astype("<i4").tobytes()}
    packed["logprobs"] = logprobs.astype("<f4").tobytes()
    return flat(turns, lambda _: peers.from_verifiers(packed))


def as_slime(turns):
    ids, counts, _ = csr(turns)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype("<i4")
    meta = {"top_p_token_ids": ids.astype("<i4"), "top_p_token_offsets": offsets}
    encoded = {name: base64.b64encode(array.tobytes()).decode() for name, array in meta.items()}
    return flat(turns, lambda _: peers.from_slime(encoded))


def as_miles(turns):
    ids, counts, logprobs = map(torch.tensor, csr(turns))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    return flat(turns, lambda _: peers.from_ids_offsets(ids.int(), offsets, logprobs))


def as_skyrl(turns):
    rows = [row for turn in turns for row in zip(*by_weight(turn), strict=True)]
    width = max(len(ids) for ids, _ in rows)
    ids, logprobs = np.full((len(rows), width), -1, np.int32), np.zeros((len(rows), width), np.float32)
    for t, (row, values) in enumerate(rows):
        ids[t, : len(row)], logprobs[t, : len(row)] = row, values
    return flat(turns, lambda _: peers.from_skyrl(ids, logprobs))


def as_skyrl_packed(turns):
    ids, counts, _ = csr(turns)
    row_offsets = np.concatenate([[0], np.cumsum(counts)])
    (mask,) = peers.from_skyrl_packed(ids, [0, counts.size], row_offsets=row_offsets)
    return flat(turns, lambda _: mask)


LAYOUTS = {
    "vllm": lambda turns: [rollout for turn in turns for rollout in as_vllm(turn)],
    "sglang": lambda turns: [rollout for turn in turns for rollout in as_sglang(turn)],
    "verifiers": as_verifiers,
    "prime_rl": as_prime_rl,
    "slime": as_slime,
    "miles": as_miles,
    "skyrl": as_skyrl,
    "skyrl_packed": as_skyrl_packed,
}
WITHOUT_LOGPROBS = {"verifiers", "slime", "skyrl_packed"}  # of the mask


def assert_same(got, want, *, members):
    for name in ("input_ids", "position_ids", "logit_positions", "targets", "loss_mask", "rollout_logprobs"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert got.lengths == want.lengths
    assert torch.equal(got.support.ids, want.support.ids)
    assert torch.equal(got.support.offsets, want.support.offsets)
    if members:
        torch.testing.assert_close(got.rollout_member_logprobs, want.rollout_member_logprobs)
    assert torch.equal(score(got).logprobs, score(want).logprobs)


@pytest.fixture(scope="module")
def ours(turns):
    batch = ReplayBatch.pack([turns], vocab_size=V)
    torch.testing.assert_close(score(batch).logprobs, batch.rollout_logprobs, atol=2e-6, rtol=0)
    return batch


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_packs_to_the_same_batch(turns, ours, layout):
    batch = ReplayBatch.pack([LAYOUTS[layout](turns)], vocab_size=V)
    assert (batch.rollout_member_logprobs is None) == (layout in WITHOUT_LOGPROBS)
    assert_same(batch, ours, members=layout not in WITHOUT_LOGPROBS)


def test_a_parquet_file_packs_to_the_same_batch(turns, ours, tmp_path):
    path = write_rollouts(tmp_path / "rollouts.parquet", turns, {"model": "toy"})
    assert_same(ReplayBatch.pack([read_rollouts(path)[0]], vocab_size=V), ours, members=True)


def test_a_branch_of_the_published_verifiers_package_packs_to_the_same_batch(turns, ours):
    graph, trace = pytest.importorskip("verifiers.v1.graph"), pytest.importorskip("verifiers.v1.trace")
    types = pytest.importorskip("verifiers.v1.types")
    nodes, seen = [], 0
    for turn in turns:
        before = turn.prompt_token_ids.tolist()[seen:]
        seen = turn.prompt_token_ids.size + turn.token_ids.size
        nodes.append(
            graph.MessageNode(
                message=types.AssistantMessage(content="x"),
                token_ids=[*before, *turn.token_ids.tolist()],
                mask=[False] * len(before) + [True] * turn.token_ids.size,
                logprobs=turn.logprobs.tolist(),
                sampling_mask=types.SamplingMask.from_sampling_mask(turn.sampling_mask.token_ids),
            )
        )
    branch = trace.Branch(index=0, nodes=nodes)
    rollouts = peers.rollouts_from_flat(
        branch.token_ids, branch.sampled_mask,
        peers.from_verifiers(branch.sampling_mask, sampled=branch.sampled_mask),
        logprobs=branch.logprobs, sampling_params=PARAMS,
    )  # fmt: skip
    assert_same(ReplayBatch.pack([rollouts], vocab_size=V), ours, members=False)


def test_an_answer_read_by_the_published_renderers_package_packs_to_the_same_batch(turns, ours):
    client = pytest.importorskip("renderers.client")
    rollouts = []
    for turn in turns:
        content = [
            {"token": f"token_id:{t}", "logprob": float(p)} for t, p in zip(turn.token_ids, turn.logprobs, strict=True)
        ]
        choice = {"index": 0, "token_ids": turn.token_ids.tolist(), "sampling_mask": turn.sampling_mask.token_ids}
        choice |= {"logprobs": {"content": content}, "finish_reason": "length"}
        body = json.dumps({"request_id": "a", "choices": [choice]}).encode()
        answer = client.parse_generate_response(body)
        rollouts += peers.rollouts_from_vllm(answer, prompt_token_ids=turn.prompt_token_ids, sampling_params=PARAMS)
    assert_same(ReplayBatch.pack([rollouts], vocab_size=V), ours, members=False)
