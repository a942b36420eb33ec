"""`PROBES`: small wanted distributions, how to sample from them, and the support each profile must give.

Slots count the handful of ids a probe is about, from 0; which ids they are is up to the target. A lower slot has the
lower id wherever that matters, so ties by id are ties by slot. Every other id has next to no mass.

The expected supports are worked out by hand from the definitions of the profiles; comments show how. "Before" an id is
the mass of the ids sorted in front of it: vllm keeps while it is < top_p, sglang while it is <= top_p, and hf drops
from below while the mass up to and with an id is <= 1 - top_p. vllm-torch and sglang-torch differ from these in ties.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

__all__ = ["GROUPS", "MARGIN", "PROBES", "PROFILES", "WIDE", "Probe", "Support"]

Support = tuple[int, ...] | Literal["all"]
"""Slots, ascending, or the whole vocabulary."""

PROFILES = ("vllm", "vllm-torch", "sglang", "sglang-torch", "hf")

MARGIN = 0.1
"""Nats by which each logit may be off without another answer under any profile; exact probes have no margin."""

WIDE = 20
"""A top_k above every handful: it cuts nothing that has mass, and bounds the row, as vLLM demands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One question to a sampler."""

    name: str
    rule: str
    """What the expected support shows, in a few words."""
    wanted: tuple[float, ...]
    """Probability of each slot before any step; they sum to 1."""
    params: Mapping[str, Any]
    """Fields of `SamplingParams` with slots for ids, and tuples of slots for bad_words."""
    vllm: Support
    vllm_torch: Support | None = None
    """None: as vllm."""
    sglang: Support | None = None
    """None: as vllm."""
    sglang_torch: Support | None = None
    """None: as sglang."""
    hf: Support | None = None
    """None: as vllm."""
    prompt: tuple[int, ...] = ()
    """Slots that end the prompt; the others are not in it."""
    output: tuple[int, ...] = ()
    """Slots generated before the position in question."""
    eos: int | None = None
    """The slot that is the model's end-of-sequence token."""
    num_completions: int = 1
    """Completions to draw at once from the same row."""
    exact: bool = False
    """Whether the answer hangs on logits that are equal to the last bit."""
    negative: bool = False
    """Whether the slots' logits must be below zero; by default they are above."""

    def expected(self, profile: str) -> Support:
        """The support under one of `PROFILES`."""
        sglang = self.vllm if self.sglang is None else self.sglang
        supports = {
            "vllm": (self.vllm, None),
            "vllm-torch": (self.vllm, self.vllm_torch),
            "sglang": (sglang, None),
            "sglang-torch": (sglang, self.sglang_torch),
            "hf": (self.vllm, self.hf),
        }
        usual, own = supports[profile]
        return usual if own is None else own

    def allows(self, profile: str, support: Support) -> bool:
        """Whether a target with this support does what the profile says.

        sglang-torch leaves open which of tied ids stay, so their number is compared, by the probabilities of the slots.
        """
        expected = self.expected(profile)
        if profile != "sglang-torch" or support == "all" or expected == "all":
            return support == expected
        return sorted(self.wanted[slot] for slot in support) == sorted(self.wanted[slot] for slot in expected)

    def params_for(self, ids: Sequence[int]) -> dict[str, Any]:
        """`params` without bad_words, with the id of each slot in its place, and a wide top_k where they have none.

        ids: the id of each slot.
        """
        params = {"top_k": WIDE, **self.params}
        params.pop("bad_words", None)
        for name in ("allowed_token_ids", "stop_token_ids"):
            if name in params:
                params[name] = [ids[slot] for slot in params[name]]
        if "logit_bias" in params:
            params["logit_bias"] = {ids[slot]: bias for slot, bias in params["logit_bias"].items()}
        return params

    def words_for(self, ids: Sequence[int]) -> list[list[int]]:
        """The ids of each bad word."""
        return [[ids[slot] for slot in word] for word in self.params.get("bad_words", ())]


_FOUR = (0.4, 0.3, 0.2, 0.1)
_FLAT = (0.25, 0.25, 0.25, 0.25)
_EIGHT = (0.3, 0.25, 0.1, 0.07, 0.07, 0.07, 0.07, 0.07)

_ONE_FILTER = (
    Probe(name="top_k", rule="the k likeliest stay", wanted=_FOUR, params={"top_k": 2}, vllm=(0, 1)),
    # The second largest is .2, and so are the third and the fourth.
    Probe(
        name="top_k_tie",
        rule="of ties with the k-th: lowest ids, or all",
        wanted=(0.4, 0.2, 0.2, 0.2),
        params={"top_k": 2},
        exact=True,
        vllm=(0, 1),
        vllm_torch=(0, 1, 2, 3),
        sglang=(0, 1, 2, 3),
        sglang_torch=(0, 1),
        hf=(0, 1, 2, 3),
    ),
    # Three above, nine tied at the fourth place.
    Probe(
        name="top_k_nine_tied",
        rule="the same with nine of them",
        wanted=(0.25, 0.2, 0.15, *9 * (0.4 / 9,)),
        params={"top_k": 4},
        exact=True,
        vllm=(0, 1, 2, 3),
        vllm_torch=tuple(range(12)),
        sglang=tuple(range(12)),
        sglang_torch=(0, 1, 2, 3),
        hf=tuple(range(12)),
    ),
    # Before the ids: 0, .5, .8, .95. hf drops .05 and .2, as they are <= .3, and not .5.
    Probe(
        name="top_p",
        rule="ids up to the one that reaches it stay",
        wanted=(0.5, 0.3, 0.15, 0.05),
        params={"top_p": 0.7},
        vllm=(0, 1),
    ),
    Probe(
        name="top_p_alone",
        rule="without a top_k too",
        wanted=(0.5, 0.3, 0.15, 0.05),
        params={"top_p": 0.7, "top_k": 0},
        vllm=(0, 1),
    ),
    Probe(
        name="top_p_first",
        rule="the first stays, though it is more",
        wanted=(0.9, 0.06, 0.04),
        params={"top_p": 0.5},
        vllm=(0,),
    ),
    # Before the ids: 0, .25, .5, .75; none is near .6. sglang keeps the tie with the last it keeps, sglang-torch does
    # not. hf drops one, .25, as .5 is not <= .4. Of ties it drops the lowest id first: the sort in transformers leaves
    # their order open, and this is what a stable one gives.
    Probe(
        name="top_p_tie",
        rule="ties at the cut: lowest ids, all, highest",
        wanted=_FLAT,
        params={"top_p": 0.6},
        exact=True,
        vllm=(0, 1, 2),
        sglang=(0, 1, 2, 3),
        sglang_torch=(0, 1, 2),
        hf=(1, 2, 3),
    ),
    # Before the third id it is .5 to the bit: < leaves it out, <= takes it in, and in sglang its tie with it. hf drops
    # .25 and .5.
    Probe(
        name="top_p_boundary",
        rule="mass before an id equal to it: < or <=",
        wanted=_FLAT,
        params={"top_p": 0.5},
        exact=True,
        vllm=(0, 1),
        sglang=(0, 1, 2, 3),
        sglang_torch=(0, 1, 2),
        hf=(2, 3),
    ),
    Probe(
        name="top_p_tiny",
        rule="1e-6 leaves the likeliest, never none",
        wanted=_FOUR,
        params={"top_p": 1e-6},
        vllm=(0,),
    ),
    # Of the largest the ids are 1, .6, .3, .1.
    Probe(
        name="min_p",
        rule="ids below that share of the likeliest go",
        wanted=(0.5, 0.3, 0.15, 0.05),
        params={"min_p": 0.2},
        vllm=(0, 1, 2),
    ),
    Probe(
        name="min_p_tie",
        rule="1.0 leaves the ties with the likeliest",
        wanted=(0.3, 0.3, 0.2, 0.2),
        params={"min_p": 1.0},
        exact=True,
        vllm=(0, 1),
    ),
    Probe(
        name="no_truncation",
        rule="no filter leaves the whole vocabulary",
        wanted=_FOUR,
        params={"top_k": 0},
        vllm="all",
    ),
)

_TOGETHER = (
    # Before the ids: 0, .42, .7, .9. vLLM's kernel halves the range of probabilities until it finds the cut, and loses
    # an id whose probability is where it halves (of .4 .3 .2 .1 the .3); .28 is not.
    Probe(
        name="top_k_and_top_p",
        rule="top_p cuts inside a wide window",
        wanted=(0.42, 0.28, 0.2, 0.1),
        params={"top_k": WIDE, "top_p": 0.55},
        vllm=(0, 1),
    ),
    # top_k leaves .65, of which the ids are .46, .38, .15: before the third, .85 >= .75; hf drops .15 and not .54.
    # sglang measures on the whole: before the third, .55 <= .75, and it is inside the window.
    Probe(
        name="top_k_then_top_p",
        rule="top_p on what top_k left, or on all",
        wanted=_EIGHT,
        params={"top_k": 3, "top_p": 0.75},
        vllm=(0, 1),
        sglang=(0, 1, 2),
    ),
    # top_k leaves .6, or .8 with the tie: before the second, .67 or .5 >= .45; hf drops .25 and .5, as they are <= .55.
    # sglang: before the second of the whole, .4 <= .45, and the third is tied with it; sglang-torch leaves that out.
    Probe(
        name="top_k_then_top_p_tie",
        rule="the same with a tie at both cuts",
        wanted=(0.4, 0.2, 0.2, 0.1, 0.1),
        params={"top_k": 2, "top_p": 0.45},
        exact=True,
        vllm=(0,),
        sglang=(0, 1, 2),
        sglang_torch=(0, 1),
    ),
    # min_p leaves .4 and .25. vllm, min_p first: before the second, .4 / .65 = .62 >= .5. On the whole it is .4, and
    # .65 before the third; hf drops .1, .2, .35 and not .6.
    Probe(
        name="min_p_and_top_p",
        rule="top_p on what min_p left, or on all",
        wanted=(0.4, 0.25, 0.15, 0.1, 0.1),
        params={"min_p": 0.5, "top_p": 0.5},
        vllm=(0,),
        sglang=(0, 1),
        hf=(0, 1),
    ),
    Probe(
        name="equal_rows",
        rule="64 equal rows: one support, draws in it",
        wanted=_EIGHT,
        params={"top_k": 3, "top_p": 0.75},
        num_completions=64,
        vllm=(0, 1),
        sglang=(0, 1, 2),
    ),
)

_TEMPERATURE = (
    # At 2 the ids are .52, .28, .20: before the second, .52 < .6. At 1 it would be .7.
    Probe(
        name="temperature_top_p",
        rule="divides before top_p",
        wanted=(0.7, 0.2, 0.1),
        params={"temperature": 2.0, "top_p": 0.6},
        vllm=(0, 1),
    ),
    # At 0.5 the ids are 1, .36, .09, .01 of the largest. At 1 the third would be .3 of it.
    Probe(
        name="temperature_min_p",
        rule="divides before min_p",
        wanted=(0.5, 0.3, 0.15, 0.05),
        params={"temperature": 0.5, "min_p": 0.2},
        vllm=(0, 1),
    ),
    # The bias puts slot 1 ahead by .59; half of that is .3, so slot 0 is .74 of it. Were the bias added after the
    # division, it would be .45 of it. vLLM takes temperatures of at most 2.
    Probe(
        name="temperature_bias",
        rule="divides after logit_bias is added",
        wanted=(0.6, 0.4),
        params={"temperature": 2.0, "logit_bias": {1: 1.0}, "min_p": 0.6},
        vllm=(0, 1),
    ),
    Probe(
        name="temperature_tiny",
        rule="0.01 leaves one id, never none",
        wanted=_FOUR,
        params={"temperature": 0.01, "top_k": 1, "top_p": 0.8},
        vllm=(0,),
    ),
    Probe(name="greedy", rule="0 leaves the likeliest id", wanted=_FOUR, params={"temperature": 0.0}, vllm=(0,)),
    Probe(
        name="greedy_tie",
        rule="of ties the lowest id",
        wanted=(0.3, 0.3, 0.2, 0.2),
        params={"temperature": 0.0},
        exact=True,
        vllm=(0,),
    ),
)

_BANS = (
    Probe(
        name="allowed_token_ids",
        rule="all other ids are banned",
        wanted=_FOUR,
        params={"allowed_token_ids": (1, 3)},
        vllm=(1, 3),
    ),
    # Of what is allowed the ids are .5, .33, .17: before them 0, .5, .83. Cut first, slots 0 and 1 would be left, and
    # of these the ban leaves slot 1.
    Probe(
        name="bans_first",
        rule="bans come before top_p",
        wanted=_FOUR,
        params={"allowed_token_ids": (1, 2, 3), "top_p": 0.65},
        vllm=(1, 2),
    ),
    # e squared times .1 is .74.
    Probe(
        name="logit_bias",
        rule="is added before the filters",
        wanted=_FOUR,
        params={"logit_bias": {3: 2.0}, "top_k": 2},
        vllm=(0, 3),
    ),
    Probe(
        name="logit_bias_ban",
        rule="-100 takes an id out",
        wanted=_FOUR,
        params={"logit_bias": {0: -100.0}, "top_k": 2},
        vllm=(1, 2),
    ),
    Probe(
        name="bad_words",
        rule="a word of one id is banned",
        wanted=_FOUR,
        params={"bad_words": ((0,),), "top_k": 2},
        vllm=(1, 2),
    ),
    Probe(
        name="bad_words_start",
        rule="its second id is free without the first",
        wanted=_FOUR,
        params={"bad_words": ((2, 0),), "top_k": 2},
        vllm=(0, 1),
    ),
    Probe(
        name="bad_words_match",
        rule="and banned behind it",
        wanted=(0.55, 0.45),
        params={"bad_words": ((1, 0),), "top_k": 1},
        output=(1,),
        vllm=(1,),
    ),
    Probe(
        name="min_tokens",
        rule="stop_token_ids are banned until then",
        wanted=_FOUR,
        params={"stop_token_ids": (0,), "min_tokens": 1, "top_k": 2},
        vllm=(1, 2),
    ),
    Probe(
        name="min_tokens_eos",
        rule="so is the model's own end token",
        wanted=_FOUR,
        params={"min_tokens": 1, "top_k": 2},
        eos=0,
        vllm=(1, 2),
    ),
    Probe(
        name="min_tokens_over",
        rule="and free again afterwards",
        wanted=(0.6, 0.4),
        params={"stop_token_ids": (0,), "min_tokens": 1, "top_k": 1},
        output=(1,),
        vllm=(0,),
    ),
)

_PENALTIES = (
    # Far above zero, half a logit is many nats.
    Probe(
        name="repetition_prompt",
        rule="repetition counts the prompt",
        wanted=(0.7, 0.3),
        params={"repetition_penalty": 2.0, "top_k": 1},
        prompt=(0,),
        vllm=(1,),
    ),
    Probe(
        name="repetition_output",
        rule="and the output",
        wanted=(0.7, 0.3),
        params={"repetition_penalty": 2.0, "top_k": 1},
        output=(0,),
        vllm=(1,),
    ),
    # Divided, a logit far below zero would rise.
    Probe(
        name="repetition_negative",
        rule="and multiplies a logit below zero",
        wanted=(0.7, 0.3),
        params={"repetition_penalty": 2.0, "top_k": 1, "allowed_token_ids": (0, 1)},
        prompt=(0,),
        negative=True,
        vllm=(1,),
    ),
    # Slot 0 is ahead by ln(7/3) = .85.
    Probe(
        name="presence",
        rule="presence is taken from ids in the output",
        wanted=(0.7, 0.3),
        params={"presence_penalty": 2.0, "top_k": 1},
        output=(0,),
        vllm=(1,),
    ),
    # Slot 0 is ahead by ln(9) = 2.2: more than 1.5, less than twice 1.5.
    Probe(
        name="presence_once",
        rule="once, however often they are there",
        wanted=(0.9, 0.1),
        params={"presence_penalty": 1.5, "top_k": 1},
        output=(0, 0),
        vllm=(0,),
    ),
    Probe(
        name="frequency",
        rule="frequency is taken for each occurrence",
        wanted=(0.9, 0.1),
        params={"frequency_penalty": 1.5, "top_k": 1},
        output=(0, 0),
        vllm=(1,),
    ),
    Probe(
        name="prompt_not_counted",
        rule="neither counts the prompt",
        wanted=(0.7, 0.3),
        params={"presence_penalty": 2.0, "frequency_penalty": 2.0, "top_k": 1},
        prompt=(0,),
        vllm=(0,),
    ),
)

GROUPS: Mapping[str, tuple[Probe, ...]] = {
    "one filter": _ONE_FILTER,
    "filters together": _TOGETHER,
    "temperature": _TEMPERATURE,
    "bans and bias": _BANS,
    "penalties": _PENALTIES,
}

PROBES: tuple[Probe, ...] = tuple(chain.from_iterable(GROUPS.values()))
