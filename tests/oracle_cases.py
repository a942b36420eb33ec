"""Rows, requests and batches for Hypothesis, and the comparison of a sampler with the oracle."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

import oracle
from keepmask.params import SamplingParams
from keepmask.sampling import DenseHead, Sampler, SamplerSpec

IMPLS = ("reference", "fast")

# Processed log-probs are float32: within 1e-5 nats, and within one rounding where they are large.
ABSOLUTE, RELATIVE = 1e-5, 2.0**-23

# A decision of the oracle this close to going the other way may be rounded differently by an equally right sum: a share
# of the mass or nats, both float64. Sums over 262,144 float64 weights err by less than 1e-10. Such rows are still
# compared, with what the filters keep this much to either side.
ROUNDING = 1e-9


@dataclass
class World:
    """What one engine fixes, and all the oracle needs to know of it."""

    vocab_size: int
    semantics: str = "vllm"
    eos_token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    thinking_start: tuple[int, ...] = ()
    thinking_end: tuple[int, ...] = ()
    processors: tuple[Any, ...] = ()

    def spec(self, **changes):
        fields = {
            "vocab_size": self.vocab_size,
            "semantics": self.semantics,
            "eos_token_ids": self.eos_token_ids,
            "banned_token_ids": self.banned_token_ids,
            "thinking_start_token_ids": self.thinking_start,
            "thinking_end_token_ids": self.thinking_end,
            "processors": self.processors,
            "logprobs_mode": "processed_logprobs",
            "return_sampling_mask": True,
        }
        return SamplerSpec(**fields | changes)


@dataclass
class Request:
    """One completion in flight, and the logits of its next position."""

    logits: np.ndarray
    params: SamplingParams
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    seed: int = 0
    completion_index: int = 0
    bad_words: list[list[int]] = field(default_factory=list)

    def open(self, sampler):
        row = sampler.open_row(
            self.params,
            prompt_token_ids=self.prompt,
            seed=self.seed,
            completion_index=self.completion_index,
            bad_words_token_ids=self.bad_words,
        )
        for token_id in self.output:
            row.append(token_id)
        return row


def truth(world, request):
    """The oracle's step, or None where it finds nothing to draw from."""
    try:
        return oracle.step(
            request.logits,
            request.params,
            request.prompt,
            request.output,
            seed=request.seed,
            completion_index=request.completion_index,
            semantics=world.semantics,
            eos_token_ids=world.eos_token_ids,
            banned_token_ids=world.banned_token_ids,
            bad_words_token_ids=request.bad_words,
            thinking_start=world.thinking_start,
            thinking_end=world.thinking_end,
            processors=[processor.definition for processor in world.processors],
        )
    except ValueError:
        return None


def close_call(step):
    """Whether float64 rounding may decide this row the other way."""
    return step.margin < ROUNDING


def assert_row(batch, i, world, request):
    """Row i of a batch sampled with masks and their logprobs in a processed mode is the oracle's step."""
    step = truth(world, request)
    if step is None:
        assert i in batch.errors, "drawn from nothing"
        assert batch.token_ids[i] == -1
        return
    assert i not in batch.errors, str(batch.errors[i])
    ids, logprobs = batch.mask.wait().row(i)
    drawn = batch.logprobs.row_logprobs(i)
    assert drawn.ids[0] == batch.token_ids[i]
    if close_call(step):
        _assert_between(ids, batch.token_ids[i], world, request)
        return
    if step.support is None:
        assert ids.size == 0, f"the whole vocabulary is an empty row, got {ids.size} ids"
    else:
        np.testing.assert_array_equal(ids, step.support)
        assert logprobs.dtype == np.float32
        lowest = float(np.finfo(np.float32).min)
        np.testing.assert_allclose(logprobs, step.logprobs.clip(lowest), rtol=RELATIVE, atol=ABSOLUTE)
    assert batch.token_ids[i] == step.token_id
    expected = step.logprobs[np.searchsorted(step.ids, step.token_id)]
    np.testing.assert_allclose(drawn.values[0], expected, rtol=RELATIVE, atol=ABSOLUTE)


def _assert_between(ids, token_id, world, request):
    """A close call keeps what a slightly stricter filter keeps, nothing that a slightly looser one drops."""
    params = request.params
    strict, loose = (
        truth(
            world,
            replace(
                request,
                params=params.replace(
                    top_p=min(params.top_p + change, 1.0) if params.top_p + change > 0 else params.top_p,
                    min_p=min(params.min_p * (1 - change), 1.0),
                ),
            ),
        )
        for change in (-2 * ROUNDING, 2 * ROUNDING)
    )
    kept = set(range(world.vocab_size)) if ids.size == 0 else set(ids.tolist())
    assert set(strict.ids.tolist()) <= kept <= set(loose.ids.tolist())
    assert token_id in kept


def sampled(sampler, requests, rows=None):
    rows = [request.open(sampler) for request in requests] if rows is None else rows
    return sampler.sample(DenseHead(torch.tensor(np.stack([request.logits for request in requests]))), rows)


def assert_batch(world, requests, impl):
    """Every row of the batch is the oracle's."""
    batch = sampled(Sampler(world.spec(), impl=impl), requests)
    for i, request in enumerate(requests):
        assert_row(batch, i, world, request)


# ---------------------------------------------------------------- strategies


def _normal(V):
    return st.builds(
        lambda seed, scale: np.random.default_rng(seed).normal(0, scale, V), st.integers(0, 2**32), st.floats(0.01, 12)
    )


def _levels(V, *levels):
    return st.lists(st.sampled_from(levels), min_size=V, max_size=V)


def _near_tied(V):
    """Around one value, one or a few float32 steps apart."""
    ulp = np.spacing(np.float32(3.25))
    return st.lists(st.integers(-3, 3), min_size=V, max_size=V).map(lambda steps: 3.25 + ulp * np.asarray(steps))


def _peaked(V):
    return st.tuples(_normal(V), st.integers(0, V - 1), st.floats(5, 60)).map(
        lambda drawn: drawn[0] + drawn[2] * (np.arange(V) == drawn[1])
    )


EXTREME = [0.0, -0.0, 1e-45, -1e-45, 1e-38, 3.4e38, -3.4e38, 1e30, -1e30, 1.0, -np.inf]


def wide_logits(V):
    """[V] float32 of the same kinds, from a seed: for rows too wide to list."""
    kinds = {
        "normal": lambda rng: rng.normal(0, rng.choice([0.1, 1.0, 3.0, 10.0]), V),
        "peaked": lambda rng: rng.normal(0, 1, V) + 20.0 * (rng.random(V) < 3 / V),
        "tied": lambda rng: np.round(rng.normal(0, 2, V)),
        "few levels": lambda rng: rng.choice([0.0, -0.0, 1.0], V),
        "near-tied": lambda rng: 3.25 + np.spacing(np.float32(3.25)) * rng.integers(-3, 4, V),
        "flat": lambda rng: np.full(V, rng.normal()),
        "banned": lambda rng: np.where(rng.random(V) < 0.7, -np.inf, rng.normal(0, 2, V)),
        "extreme": lambda rng: rng.choice(EXTREME, V),
        "descending": lambda rng: -np.arange(V) * rng.choice([1e-3, 0.1, 2.0]),
    }
    return st.tuples(st.sampled_from(list(kinds)), st.integers(0, 2**32)).map(
        lambda drawn: kinds[drawn[0]](np.random.default_rng(drawn[1])).astype(np.float32)
    )


def logits(V):
    """[V] float32: spread, listed, peaked, tied, near-tied, flat and extreme rows, some with -inf."""
    row = st.one_of(
        _normal(V),
        st.lists(st.floats(-60, 60, width=32), min_size=V, max_size=V),
        _peaked(V),
        _levels(V, 0.0, 1.0),
        _levels(V, 0.0, 0.5, 2.0, -3.0, -200.0),
        _near_tied(V),
        st.floats(-5, 5).map(lambda value: np.full(V, value)),
        _levels(V, 1.0, 0.0, -0.0, -np.inf),
        _levels(V, *EXTREME),
    )
    return row.map(lambda values: np.asarray(values, np.float32))


def ids(V, max_size=8):
    return st.lists(st.integers(0, V - 1), max_size=max_size)


def filters(V):
    return {
        "temperature": st.one_of(
            st.sampled_from([1.0, 0.5, 1.7, 0.0, 9e-6, 1e-5, 1e-4, 100.0]), st.floats(0.05, 5), st.just(0.7)
        ),
        "top_k": st.one_of(st.integers(-1, V + 1), st.integers(1, 8), st.just(2**31 - 1)),
        "top_p": st.one_of(
            st.sampled_from([0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1 - 2**-53, 1e-12]), st.floats(0.001, 0.9999)
        ),
        "min_p": st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(1e-6, 1.0)),
        "sampling_semantics": st.sampled_from(["vllm", "vllm-torch", "sglang", "sglang-torch", "hf"]),
    }


def processing(V):
    return {
        "logit_bias": st.dictionaries(st.integers(0, V - 1), st.floats(-100, 100), max_size=4),
        "allowed_token_ids": ids(V).filter(len),
        "stop_token_ids": ids(V, 3),
        "min_tokens": st.integers(0, 6),
        "repetition_penalty": st.one_of(st.sampled_from([1.3, 0.5, 1.0]), st.floats(0.01, 10)),
        "frequency_penalty": st.floats(-2, 2),
        "presence_penalty": st.floats(-2, 2),
        "thinking_token_budget": st.integers(0, 4),
    }


def params(V):
    """Each field present or not, so that most requests use a few together."""
    fields = st.fixed_dictionaries({}, optional=filters(V) | processing(V))
    return fields.map(lambda given: SamplingParams(logprobs=3, return_sampling_mask_logprobs=True, **given))


def requests(V, rows=logits):
    return st.builds(
        Request,
        logits=rows(V),
        params=params(V),
        prompt=ids(V),
        output=ids(V),
        seed=st.one_of(st.integers(0, 20), st.integers(-(2**63), 2**64 - 1)),
        completion_index=st.integers(0, 3),
        bad_words=st.lists(ids(V, 3).filter(len), max_size=3),
    )


@st.composite
def worlds(draw, max_vocab_size=24):
    V = draw(st.integers(4, max_vocab_size))
    thinking = draw(st.booleans())
    return World(
        vocab_size=V,
        semantics=draw(st.sampled_from(["vllm", "vllm-torch", "sglang", "sglang-torch", "hf"])),
        eos_token_ids=tuple(draw(ids(V, 2))),
        banned_token_ids=tuple(draw(ids(V, 2))),
        # Other tokens open than close a thinking span.
        thinking_start=(0, 1)[: draw(st.integers(1, 2))] if thinking else (),
        thinking_end=(2, 3)[: draw(st.integers(1, 2))] if thinking else (),
    )


@st.composite
def batches(draw, max_size=5, max_vocab_size=24):
    """A world and some requests in it that have nothing in common."""
    world = draw(worlds(max_vocab_size))
    batch = draw(st.lists(requests(world.vocab_size), min_size=1, max_size=max_size))
    for request in batch:
        if not world.thinking_start:
            request.params = request.params.replace(thinking_token_budget=None)
        if request.params.thinking_token_budget is not None:
            request.output = []  # an output that ignores what was forced cannot come about
    return world, batch
