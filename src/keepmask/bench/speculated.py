"""What speculation brings: rollouts with and without drafts, in turn on one engine, their tokens equal to the bit.

    scripts/bench speculated            a table
    scripts/bench speculated --json     one JSON row a measurement
    scripts/bench speculated --quick    smaller sizes: does it run, not how fast

epoch       a second epoch over the same prompts, after every weight has moved by 1e-6 one way or the other, guessed by
            the first: with the seeds of the first, and with others
repetition  n-grams, on prompts that ask for text that is in them
never       guesses that are never drawn, as many as the engine cares to verify
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from transformers.utils.logging import disable_progress_bar

from keepmask.bench.machine import machine_facts
from keepmask.bench.timing import Row, arguments, quantiles, report
from keepmask.config import SpeculativeConfig
from keepmask.drafts import HistoryStore, StepCost, SuffixDrafter
from keepmask.engine.speculation import Speculation, measured_cost
from keepmask.llm import LLM
from keepmask.outputs import RequestOutput
from keepmask.params import SamplingParams

Cost = tuple[StepCost, float]
"""What `measured_cost` found."""

SAMPLING = {"temperature": 1.0, "top_k": 50, "top_p": 0.95, "logprobs": 0, "ignore_eos": True}

PROMPTS = [
    "The history of the city begins with",
    "Here is a short recipe for bread. First,",
    "Once upon a time, in a small village,",
    "def quicksort(values):\n",
    "The three laws of motion state that",
    "Dear Sir or Madam,\n\nI am writing to",
    "Question: What is photosynthesis?\nAnswer:",
    "The following is a list of countries and their capitals:\n",
]

REPEATED = [
    "Copy the list.\nList: apples, pears, plums, cherries, figs, dates\nCopy: apples, pears, plums, cherries, figs, "
    "dates\nCopy again: apples,",
    "x = compute(first, second)\ny = compute(second, third)\nz = compute(third, fourth)\nx = compute(first,",
]


class Sizes(NamedTuple):
    rounds: int = 3
    requests: tuple[int, ...] = (1, 8, 64)
    output: int = 128


FULL = Sizes()
QUICK = Sizes(rounds=1, requests=(1, 2), output=12)


class Never:
    """A drafter whose guesses are ids that are never drawn."""

    step_s = 0.0

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id

    def expect(self, prompt_token_ids: Sequence[int]) -> None:
        """Nothing to prepare."""

    def release(self, prompt_token_ids: Sequence[int]) -> None:
        """Nothing to give up."""

    def open(
        self, prompt_token_ids: Sequence[int], *, params: SamplingParams, seed: int, completion_index: int
    ) -> NeverRow:
        """A row, which is the same for all."""
        return NeverRow()

    def propose(self, rows: Sequence[NeverRow], most: Sequence[int]) -> list[list[int]]:
        """The id, as often as is asked for."""
        return [[self._token_id] * count for count in most]


class NeverRow:
    """Knows nothing."""

    def append(self, token_id: int) -> None:
        """Whatever is drawn."""

    def close(self) -> None:
        """Nothing to give up."""


def run(llm: LLM, prompts: list[str], params: list[SamplingParams], at_once: int) -> tuple[float, list[RequestOutput]]:
    """Seconds, and what came: `at_once` requests at a time, the next ones when those are done."""
    outputs: list[RequestOutput] = []
    llm.engine.reset_prefix_cache()
    start = time.perf_counter()
    for first in range(0, len(prompts), at_once):
        part = slice(first, first + at_once)
        outputs += llm.generate(prompts[part], params[part], use_tqdm=False)
    return time.perf_counter() - start, outputs


def compared(
    llm: LLM,
    prompts: list[str],
    params: list[SamplingParams],
    at_once: int,
    speculation: Callable[[], Speculation],
    rounds: int,
) -> tuple[list[float], list[float], float]:
    """Tokens/s without and with drafts, and the share of guesses that were drawn. Raises where any bit differs."""
    without, with_drafts, share = [], [], 0.0
    for _ in range(rounds):
        llm.engine.speculate(None)
        seconds, expected = run(llm, prompts, params, at_once)
        num_tokens = sum(len(one.token_ids) for output in expected for one in output.outputs)
        without.append(num_tokens / seconds)
        guessing = speculation()
        llm.engine.speculate(guessing)
        seconds, outputs = run(llm, prompts, params, at_once)
        with_drafts.append(num_tokens / seconds)
        llm.engine.speculate(None)
        if _bits(outputs) != _bits(expected):
            raise AssertionError("drafts changed what was drawn: this is a fault of the engine, please report it")
        share = guessing.num_accepted / max(1, guessing.num_drafted)
    return without, with_drafts, share


def _bits(outputs: list[RequestOutput]) -> list[Any]:
    return [(list(one.token_ids), one.sampling_mask, one.logprobs) for output in outputs for one in output.outputs]


def epochs(llm: LLM, cost: Cost, sizes: Sizes) -> Iterator[Row]:
    """The second epoch, guessed by the first."""
    generator = torch.Generator().manual_seed(0)
    for at_once in sizes.requests:
        prompts = [PROMPTS[number % len(PROMPTS)] for number in range(max(at_once, len(PROMPTS)))]
        if at_once == 1:
            prompts = prompts[:2]
        params = [_params(seed, sizes) for seed in range(len(prompts))]
        _, first = run(llm, prompts, params, len(prompts))
        # A step of Adam at this learning rate; bfloat16 rounds most of it away. A tied head follows the embeddings.
        weights = {
            name: weight + 1e-6 * (torch.randint(2, weight.shape, generator=generator) * 2 - 1).to(weight.dtype)
            for name, weight in llm.engine.weights().items()
            if name != "lm_head.weight"
        }
        llm.update_weights(weights, partial=True)
        for seeds, again in (("same", params), ("other", [_params(1000 + seed, sizes) for seed in range(len(params))])):

            def speculation(first: list[RequestOutput] = first) -> Speculation:
                history = HistoryStore(max_bytes=2**28)
                history.extend(rollout for output in first for rollout in output.rollouts())
                return Speculation(
                    SpeculativeConfig(method="history"), SuffixDrafter("history", history=history), *cost
                )

            found = compared(llm, prompts, again, at_once, speculation, sizes.rounds)
            yield _row("epoch", {"requests": at_once, "output": sizes.output}, found) | {"seeds": seeds}


def repetition(llm: LLM, cost: Cost, sizes: Sizes) -> Iterator[Row]:
    """One request at a time that repeats its prompt."""
    params = [_params(seed, sizes, temperature=0.3) for seed in range(len(REPEATED))]

    def speculation() -> Speculation:
        return Speculation(SpeculativeConfig(method="ngram"), SuffixDrafter("ngram"), *cost)

    yield _row(
        "repetition",
        {"requests": 1, "output": sizes.output},
        compared(llm, REPEATED, params, 1, speculation, sizes.rounds),
    )


def never(llm: LLM, cost: Cost, sizes: Sizes) -> Iterator[Row]:
    """Guesses that come to nothing."""
    banned = llm.engine.runner.vocab_size - 1
    for at_once in sizes.requests:
        prompts = [PROMPTS[number % len(PROMPTS)] for number in range(at_once)]
        params = [_params(seed, sizes, logit_bias={banned: -100.0}) for seed in range(at_once)]

        def speculation() -> Speculation:
            return Speculation(SpeculativeConfig(method="ngram"), Never(banned), *cost)

        found = compared(llm, prompts, params, at_once, speculation, sizes.rounds)
        yield _row("never", {"requests": at_once, "output": sizes.output}, found)


def _params(seed: int, sizes: Sizes, **fields: Any) -> SamplingParams:
    return SamplingParams(**SAMPLING | fields, seed=seed, max_tokens=sizes.output, return_sampling_mask=True)


def _row(op: str, shape: dict[str, int], found: tuple[list[float], list[float], float]) -> Row:
    without, with_drafts, share = found
    gains = [new / old for new, old in zip(with_drafts, without, strict=True)]
    return (
        {"op": op, "shape": shape, "implementation": "keepmask", "unit": "tokens/s"}
        | quantiles(with_drafts)
        | {
            "without": quantiles(without)["p50"],
            "gain": quantiles(gains)["p50"],
            "accepted": share,
        }
    )


def line(row: Row) -> str:
    """A row for people."""
    shape = ", ".join(f"{name} {value}" for name, value in row["shape"].items())
    seeds = f" {row['seeds']} seeds" if "seeds" in row else ""
    return (
        f"{row['op'] + seeds:20s} {shape:28s} {row['without']:8.1f} -> {row['p50']:8.1f} tokens/s   "
        f"{row['gain']:5.2f} times, {row['accepted']:.0%} of guesses drawn"
    )


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller sizes: does it run, not how fast")
    args = parser.parse_args()
    sizes = QUICK if args.quick else FULL
    disable_progress_bar()
    llm = LLM("smollm2-135m", logprobs_mode="processed_logprobs", max_model_len=512, max_num_seqs=128)
    cost = measured_cost(llm.engine.runner, llm.engine.sampler, 2048)
    facts = machine_facts() | {"dtype": str(llm.engine.runner.dtype).removeprefix("torch.")}
    run(llm, PROMPTS[:2], [_params(0, QUICK)] * 2, 2)
    for measure in (epochs, repetition, never):
        report(measure(llm, cost, sizes), facts, None if args.json else line)


if __name__ == "__main__":
    main()
