"""The definitions the product is held against: NumPy, one row at a time, sharing no code with it.

`step` is the order from raw logits to a token. Every function before it is one rule of that order, and the last section
defines what a trainer must get when it replays a row. Rows are [V] arrays; z is a row of logits on its way. The steps
before the filters keep the dtype of z, which is float32 in `step`; the filters, sums of probabilities and log-probs are
float64. A banned or dropped id has z = -inf.

`params` is any object with the fields of `keepmask.SamplingParams`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

GREEDY_TEMPERATURE = 1e-5
WORD = 0xFFFFFFFF

Row = NDArray[Any]
Ids = Sequence[int]


# ---------------------------------------------------------------- steps 1 to 7: processors


def banned(z: Row, ids: Collection[int]) -> Row:
    """z with these ids banned."""
    z = z.copy()
    z[list(ids)] = -np.inf
    return z


def allowed(z: Row, ids: Collection[int] | None) -> Row:
    """z with every other id banned; None bans nothing."""
    if ids is None:
        return z
    return banned(z, set(range(z.size)) - set(ids))


def min_tokens(z: Row, minimum: int, output: Ids, stop_ids: Collection[int]) -> Row:
    """The ids that would end the output are banned while it has fewer tokens than the minimum."""
    return banned(z, stop_ids) if len(output) < minimum else z


def logit_bias(z: Row, bias: Mapping[int, float]) -> Row:
    """Each biased id's value is added to its logit."""
    z = z.copy()
    for token_id, value in bias.items():
        z[token_id] += z.dtype.type(value)
    return z


def repetition(z: Row, penalty: float, prompt: Ids, output: Ids) -> Row:
    """Ids in the prompt or the output: a positive logit is divided by the penalty, any other is multiplied by it.

    Keskar et al. 2019, https://arxiv.org/abs/1909.05858, section 4.1.
    """
    z = z.copy()
    penalty = z.dtype.type(penalty)
    for token_id in set(prompt) | set(output):
        z[token_id] = z[token_id] / penalty if z[token_id] > 0 else z[token_id] * penalty
    return z


def frequency_and_presence(z: Row, frequency: float, presence: float, output: Ids) -> Row:
    """Ids in the output lose the frequency penalty once an occurrence, and the presence penalty once."""
    z = z.copy()
    for token_id in set(output):
        z[token_id] -= z.dtype.type(frequency) * z.dtype.type(list(output).count(token_id))
        z[token_id] -= z.dtype.type(presence)
    return z


def bad_words(z: Row, words: Sequence[Ids], output: Ids) -> Row:
    """The last id of a word is banned where the output ends with the ids before it; a word of one id always."""
    ends = [word[-1] for word in words if _ends_with(output, word[:-1])]
    return banned(z, ends)


def thinking_force(budget: int | None, prompt: Ids, output: Ids, start: Ids, end: Ids) -> int | None:
    """The id that must come next because the thinking budget is spent, or None.

    A span opens behind a start sequence outside of spans and closes behind the next end sequence. It may hold `budget`
    tokens. Then the ids of `end` come one by one, going on from as many of them as the span ends with.
    """
    if budget is None or not start or not end:
        return None
    span = _open_span([*prompt, *output], start, end)
    if span is None or len(span) < budget:
        return None
    done = max(count for count in range(len(end)) if _ends_with(span, end[:count]))
    return end[done]


def only(z: Row, token_id: int) -> Row:
    """z with every other id banned, and this one not: its logit is 0 if it was."""
    alone = np.full_like(z, -np.inf)
    alone[token_id] = z[token_id] if z[token_id] > -np.inf else 0
    return alone


def temperature(z: Row, T: float) -> Row:
    """z / T."""
    return z / z.dtype.type(T)


def _ends_with(ids: Ids, tail: Ids) -> bool:
    return len(tail) <= len(ids) and list(ids[len(ids) - len(tail) :]) == list(tail)


def _open_span(text: Ids, start: Ids, end: Ids) -> Ids | None:
    """The tokens of the span that the text leaves open, None where it leaves none open."""
    opened, behind = False, 0
    for i in range(1, len(text) + 1):
        if _ends_with(text[behind:i], end if opened else start):
            opened, behind = not opened, i
    return text[behind:] if opened else None


# ---------------------------------------------------------------- steps 8 to 10: filters


class Cut(NamedTuple):
    """What a filter keeps, [V] bool, and how far its nearest decision was from the other way.

    The margin is a share of the whole mass for top-p and nats for min-p. It is inf where no rounding enters: logits
    compared with each other, and sums of weights that are all 0 or 1.
    """

    keep: NDArray[np.bool_]
    margin: float = math.inf


def exactly_top_k(z: Row, k: int) -> Cut:
    """Sort by (z descending, id ascending); keep the first k, so of ties with the k-th the lowest ids; k <= 0: all."""
    rank = np.empty(z.size, np.int64)
    rank[np.argsort(-z, kind="stable")] = np.arange(z.size)
    return Cut(((rank < k) | (k <= 0)) & (z > -np.inf))


def top_k(z: Row, k: int) -> Cut:
    """Keep logits >= the k-th largest, so ties with it stay; k <= 0 or k >= V keeps all that is left."""
    if not 0 < k < z.size:
        return Cut(z > -np.inf)
    return Cut((z >= np.sort(z)[::-1][k - 1]) & (z > -np.inf))


def min_p(z: Row, p: float) -> Cut:
    """Keep logits >= max + ln(p): probabilities of at least p times the largest."""
    if p <= 0:
        return Cut(z > -np.inf)
    floor = z.max() + math.log(p)
    return Cut(z >= floor, math.inf if p == 1 else float(np.abs(z - floor).min()))


def top_p(z: Row, p: float) -> Cut:
    """Sort by (z descending, id ascending); keep an id while the mass before it is < p of the whole."""
    if p >= 1:
        return Cut(z > -np.inf)
    order, before, total, margin = _mass_before(z, p)
    return Cut(_scattered(order, before < p * total), margin)


def top_p_inclusive(z: Row, p: float) -> Cut:
    """Sort by z descending; keep an id while the mass before it is <= p of the whole, and ties with the last kept."""
    if p >= 1:
        return Cut(z > -np.inf)
    order, before, total, margin = _mass_before(z, p)
    last = z[order[np.flatnonzero(before <= p * total)[-1]]]
    return Cut((z >= last) & (z > -np.inf), margin)


def top_p_inclusive_count(z: Row, p: float) -> Cut:
    """Sort by (z descending, id ascending); keep an id while the mass before it is <= p of the whole."""
    if p >= 1:
        return Cut(z > -np.inf)
    order, before, total, margin = _mass_before(z, p)
    return Cut(_scattered(order, before <= p * total) & (z > -np.inf), margin)


def top_p_from_below(z: Row, p: float) -> Cut:
    """Sort by (z ascending, id ascending); drop an id while the mass up to and with it is <= 1 - p of the whole.

    The last id of that order always stays. This is how `transformers.TopPLogitsWarper` cuts: of tied ids it drops the
    lowest first.
    """
    if p >= 1:
        return Cut(z > -np.inf)
    order = np.argsort(z, kind="stable")
    upto = np.cumsum(np.exp(z[order] - z.max()))
    drop = upto <= (1 - p) * upto[-1]
    drop[-1] = False
    margin = float(np.abs(upto / upto[-1] - (1 - p)).min())
    return Cut(_scattered(order, ~drop) & (z > -np.inf), margin)


def filters_vllm(z: Row, params: Any) -> Cut:
    """min-p, then exactly k, then top-p on what they left: vLLM's Triton sampler."""
    return _one_after_the_other(z, (min_p, params.min_p), (exactly_top_k, params.top_k), (top_p, params.top_p))


def filters_vllm_torch(z: Row, params: Any) -> Cut:
    """min-p, then top-k with its ties, then top-p on what they left: vLLM's PyTorch path."""
    return _one_after_the_other(z, (min_p, params.min_p), (top_k, params.top_k), (top_p, params.top_p))


def filters_hf(z: Row, params: Any) -> Cut:
    """top-k, then top-p on what it left, then min-p."""
    return _one_after_the_other(z, (top_k, params.top_k), (top_p_from_below, params.top_p), (min_p, params.min_p))


def filters_sglang(z: Row, params: Any) -> Cut:
    """top-p and top-k, each on the whole distribution, and the ids both keep; then min-p."""
    nucleus, window, rest = top_p_inclusive(z, params.top_p), top_k(z, params.top_k), min_p(z, params.min_p)
    return Cut(nucleus.keep & window.keep & rest.keep, min(nucleus.margin, rest.margin))


def filters_sglang_torch(z: Row, params: Any) -> Cut:
    """The same with exact numbers of ids, of ties the lowest."""
    nucleus, window = top_p_inclusive_count(z, params.top_p), exactly_top_k(z, params.top_k)
    rest = min_p(z, params.min_p)
    return Cut(nucleus.keep & window.keep & rest.keep, min(nucleus.margin, rest.margin))


FILTERS: dict[str, Callable[[Row, Any], Cut]] = {
    "vllm": filters_vllm,
    "vllm-torch": filters_vllm_torch,
    "sglang": filters_sglang,
    "sglang-torch": filters_sglang_torch,
    "hf": filters_hf,
}


def _one_after_the_other(z: Row, *stages: tuple[Callable[[Row, Any], Cut], float]) -> Cut:
    margin = math.inf
    for cut_of, value in stages:
        cut = cut_of(z, value)
        z, margin = np.where(cut.keep, z, -np.inf), min(margin, cut.margin)
    return Cut(z > -np.inf, margin)


def _mass_before(z: Row, p: float) -> tuple[Row, Row, float, float]:
    """Ids by (z descending, id ascending), unnormalised mass before each, mass of all, and the margin of a cut at p."""
    order = np.argsort(-z, kind="stable")
    weights = np.exp(z[order] - z.max())
    upto = np.cumsum(weights)
    before = np.concatenate([[0.0], upto[:-1]])
    exact = z.size == 1 or np.isin(weights, (0.0, 1.0)).all()
    return order, before, upto[-1], math.inf if exact else float(np.abs(before[1:] / upto[-1] - p).min())


def _scattered(order: Row, keep_in_order: NDArray[np.bool_]) -> NDArray[np.bool_]:
    keep = np.zeros(order.size, np.bool_)
    keep[order] = keep_in_order
    return keep


# ---------------------------------------------------------------- the draw


def philox4x32(counter: Sequence[Any], key: Sequence[int], rounds: int = 10) -> tuple[Any, Any, Any, Any]:
    """Philox 4x32 (Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405): four random 32-bit words.

    counter: four words, each an int or a uint64 array of words. key: two words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        left, right = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (right >> 32) ^ c1 ^ k0, right & WORD, (left >> 32) ^ c3 ^ k1, left & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


def uniform(ids: Row, seed: int, completion_index: int, position: int) -> Row:
    """A random number for each of these ids, float64: the midpoint of one of 2**52 equal cells of (0, 1)."""
    counter = (np.asarray(ids, np.uint64), position, completion_index, 0)
    x0, x1, _, _ = philox4x32(counter, (seed % 2**64 & WORD, seed % 2**64 >> 32))
    cell = (x0 >> 6) * 2**26 + (x1 >> 6)
    return (cell.astype(np.float64) + 0.5) * 2.0**-52


def gumbel(ids: Row, seed: int, completion_index: int, position: int) -> Row:
    """Standard Gumbel noise of these ids, float64: -log(-log(u))."""
    return -np.log(-np.log(uniform(ids, seed, completion_index, position)))


def log_softmax(z: Row) -> Row:
    """z - log(sum(exp(z))), float64."""
    z = np.asarray(z, np.float64)
    shifted = z - z.max()
    return shifted - np.log(np.exp(shifted).sum())


# ---------------------------------------------------------------- the order


@dataclass(frozen=True)
class Step:
    """What one position must give."""

    support: NDArray[np.int64] | None
    """Ids that could be drawn, ascending; None where that is the whole vocabulary."""
    probabilities: Row
    """Of each id of the support (of each of V, where it is None), float64."""
    logprobs: Row
    """Their logarithms: the processed log-probs."""
    logits: Row
    """[V] float32: z after the last step that applies, -inf outside the support."""
    raw_logprobs: Row
    """[V] log-softmax of the logits as they came."""
    token_id: int
    """The drawn id."""
    margin: float
    """How far the nearest decision of filters or draw was from going the other way; see Cut."""

    @property
    def ids(self) -> NDArray[np.int64]:
        """The ids that could be drawn, ascending, listed also where that is the whole vocabulary."""
        return np.flatnonzero(self.logits > -np.inf)


@np.errstate(over="ignore")
def step(
    logits: Row,
    params: Any,
    prompt: Ids,
    output: Ids,
    *,
    seed: int,
    completion_index: int = 0,
    semantics: str = "vllm",
    eos_token_ids: Ids = (),
    banned_token_ids: Ids = (),
    bad_words_token_ids: Sequence[Ids] = (),
    thinking_start: Ids = (),
    thinking_end: Ids = (),
    processors: Sequence[Callable[[Row], Row]] = (),
) -> Step:
    """From the raw logits of one position to its support, its probabilities and the drawn id.

    logits: [V]. prompt, output: the token ids before this position. Raises ValueError for NaN or +inf among the logits,
    raw or processed, and where nothing is left to draw.
    """
    raw = np.asarray(logits, np.float32)
    _refuse_nan_and_infinity(raw)

    z = allowed(raw, params.allowed_token_ids)
    z = min_tokens(z, params.min_tokens, output, {*eos_token_ids, *params.stop_token_ids})
    z = banned(z, banned_token_ids)
    z = logit_bias(z, params.logit_bias)
    z = repetition(z, params.repetition_penalty, prompt, output)
    z = frequency_and_presence(z, params.frequency_penalty, params.presence_penalty, output)
    z = bad_words(z, bad_words_token_ids, output)
    for processor in processors:
        z = processor(z)

    forced = thinking_force(params.thinking_token_budget, prompt, output, thinking_start, thinking_end)
    if forced is not None:
        z = only(z, forced)
    if not (z > -np.inf).any():
        raise ValueError("every id is banned")
    _refuse_nan_and_infinity(z)
    if params.temperature < GREEDY_TEMPERATURE:
        return _drawn(only(z, int(z.argmax())), raw, (seed, completion_index, len(output)), math.inf)

    z = temperature(z, params.temperature)
    _refuse_nan_and_infinity(z)
    if not (z > -np.inf).any():
        raise ValueError("every id underflows")
    cut = FILTERS[params.sampling_semantics or semantics](z.astype(np.float64), params)
    return _drawn(np.where(cut.keep, z, -np.inf), raw, (seed, completion_index, len(output)), cut.margin)


def _refuse_nan_and_infinity(z: Row) -> None:
    if np.isnan(z).any() or np.isposinf(z).any():
        raise ValueError("NaN or +inf among the logits")


def _drawn(z: Row, raw: Row, key: tuple[int, int, int], margin: float) -> Step:
    """Gumbel-max over the support: argmax of z + noise, ties to the lowest id."""
    ids = np.flatnonzero(z > -np.inf)
    logprobs = log_softmax(z[ids])
    scores = z[ids].astype(np.float64) + gumbel(ids, *key)
    first, second = np.sort(np.append(scores, -np.inf))[::-1][:2]
    return Step(
        support=None if ids.size == z.size else ids,
        probabilities=np.exp(logprobs),
        logprobs=logprobs,
        logits=z,
        raw_logprobs=log_softmax(raw),
        token_id=int(ids[scores.argmax()]),
        margin=min(margin, float(first - second)),
    )


# ---------------------------------------------------------------- replay


def transformed(logits: Row, params: Any, prompt: Ids, output: Ids) -> Row:
    """[V] float64: the steps that change the relative weights of survivors, on the whole row.

    Bias, penalties and temperature. `output` holds the tokens before this position. Bans are left out: they decide who
    survives, and the support already says that.
    """
    z = logit_bias(np.asarray(logits, np.float64), params.logit_bias)
    z = repetition(z, params.repetition_penalty, prompt, output)
    z = frequency_and_presence(z, params.frequency_penalty, params.presence_penalty, output)
    return temperature(z, params.temperature)


def replayed(logits: Row, params: Any, prompt: Ids, output: Ids, support: Ids | None) -> Row:
    """Log-probs of the support's ids, float64: transform the whole row, mask it to the support, log-softmax.

    A support of one id has log-prob 0 whatever the parameters (greedy and forced tokens). None is the whole vocabulary.
    """
    if support is not None and len(support) == 1:
        return np.zeros(1)
    z = transformed(logits, params, prompt, output)
    if support is None:
        return log_softmax(z)
    masked = np.full_like(z, -np.inf)
    masked[list(support)] = z[list(support)]
    return log_softmax(masked)[list(support)]


def entropy(logprobs: Row) -> float:
    """-sum(p log p) in nats, with 0 log 0 = 0."""
    live = logprobs[logprobs > -np.inf]
    return float(-(np.exp(live) * live).sum())


def kl(logprobs: Row, ref_logprobs: Row) -> float:
    """KL(policy || reference) = sum(p (log p - log q)) in nats, both on one support, with 0 log 0 = 0."""
    live = logprobs > -np.inf
    return float((np.exp(logprobs[live]) * (logprobs[live] - ref_logprobs[live])).sum())


def kept_mass(logits: Row, params: Any, prompt: Ids, output: Ids, support: Ids | None) -> float:
    """Probability of the support under the transformed whole row: what a full-vocabulary softmax gives away."""
    if support is None:
        return 1.0
    return float(np.exp(log_softmax(transformed(logits, params, prompt, output))[list(support)]).sum())
