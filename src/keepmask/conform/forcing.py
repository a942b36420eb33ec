"""Make a model somebody else runs have the distribution a probe wants, by `logit_bias` alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from statistics import median

from keepmask.conform.mask_routes import Route
from keepmask.conform.probes import MARGIN, Probe

__all__ = ["LIFT", "NO_TIES", "NotForcedError", "Tokens", "force", "lifted", "ties_hold"]

Tokens = tuple[int, ...]

NO_TIES = "needs logits that are equal to the bit, and this server's log-probabilities would not become so and stay so"

LIFT = 70.0
"""The largest bias. It lifts the handful over the rest of the vocabulary, and its logits over zero. Engines take
biases up to 100; a probe's own come on top."""
_SINK = -60.0  # the same for logits that have to be below zero

_MAX_READS = 10
_TOLERANCE = 0.3 * MARGIN  # the rest is for what changes between reading and drawing, as in bfloat16
_ALIKE = 1e-3  # nats; closer than this, ties are made equal to the bit
_REST = math.log(1e-6 / 2**18)
"""No other id's log-probability may be above this, so that 262,144 of them have less than a millionth of the mass."""


class NotForcedError(Exception):
    """The wanted distribution could not be had; the message says why."""


def force(route: Route, context: Tokens, ids: Tokens, probe: Probe) -> dict[int, float]:
    """The bias of each id under which, behind `context`, slot i has probability probe.wanted[i].

    The log-probabilities the server returns are read, and the biases corrected by what is missing, until all are within
    0.03 nats; where the probe is exact, until those of ids wanted alike are equal as well. Raises NotForcedError when
    they do not get there.
    """
    wanted = dict(zip(ids, map(math.log, probe.wanted), strict=True))
    lift = _SINK if probe.negative else LIFT
    bias = dict.fromkeys(ids, lift)
    missing = dict.fromkeys(ids, math.inf)
    for turn in range(_MAX_READS):
        seen = lifted(route, context, bias, alone=probe.negative)
        missing = {token_id: wanted[token_id] - seen[token_id] for token_id in ids}
        largest = max(map(abs, missing.values()))
        if largest < _TOLERANCE and (not probe.exact or _ties_equal(seen, ids, probe)):
            return bias
        if largest < _ALIKE:
            for tied in _tied(ids, probe):
                bias |= _moved_together(bias, seen, tied, turn)
        else:
            bias = {token_id: bias[token_id] + missing[token_id] for token_id in ids}
            top = max(bias.values())
            bias = {token_id: value + lift - top for token_id, value in bias.items()}
            if min(bias.values()) < -100:
                raise NotForcedError("its logits are too far apart for biases of at most 100")
    if max(map(abs, missing.values())) < _TOLERANCE:
        raise NotForcedError(NO_TIES)
    raise NotForcedError(
        f"after {_MAX_READS} corrections its log-probabilities are still {max(map(abs, missing.values())):.2g} nats off"
    )


def ties_hold(route: Route, context: Tokens, bias: dict[int, float], ids: Tokens, probe: Probe) -> bool:
    """Whether ids wanted alike have equal log-probabilities under these biases."""
    return _ties_equal(lifted(route, context, bias, alone=probe.negative), ids, probe)


def lifted(route: Route, context: Tokens, bias: dict[int, float], *, alone: bool = False) -> dict[int, float]:
    """Log-probabilities of the biased ids behind `context`. alone: with all others banned.

    Raises NotForcedError where the others have mass beside them.
    """
    only = {"allowed_token_ids": list(bias)} if alone else {}
    seen = route.read(context, {"logit_bias": bias, **only})
    rest = max((logprob for token_id, logprob in seen.items() if token_id not in bias), default=-math.inf)
    if not set(bias) <= set(seen) or rest > _REST:
        raise NotForcedError(f"biases of up to {LIFT:.0f} do not lift its ids over all others")
    return seen


def _moved_together(bias: dict[int, float], seen: dict[int, float], tied: Sequence[int], turn: int) -> dict[int, float]:
    """Biases under which these ids should become equal: the others go to where one of them is.

    Rounding to even may keep an id from every other value. Moved by one step it jumps two, so it is the others that
    must go to it; it shows by being farthest from the middle, or in a pair by turns.
    """
    middle = median(seen[token_id] for token_id in tied)
    farthest = sorted(tied, key=lambda token_id: -abs(seen[token_id] - middle))
    goal = seen[farthest[turn % min(2, len(tied))]]
    return {token_id: bias[token_id] + goal - seen[token_id] for token_id in tied}


def _ties_equal(seen: dict[int, float], ids: Tokens, probe: Probe) -> bool:
    return all(len({seen[token_id] for token_id in tied}) == 1 for tied in _tied(ids, probe))


def _tied(ids: Tokens, probe: Probe) -> Iterator[Sequence[int]]:
    """The ids of each wanted probability. Slots that are wanted alike stand side by side."""
    for _, slots in groupby(zip(probe.wanted, ids, strict=True), key=lambda slot: slot[0]):
        yield [token_id for _, token_id in slots]
