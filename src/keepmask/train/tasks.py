"""`Task`: problems made from a seed, and a reward that is computed, not judged."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from keepmask.errors import ConfigError

__all__ = ["TASKS", "Problem", "Task", "task_named"]

_HELD_OUT = 1_000_003  # added to the seed of held-out problems


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt that ends where the answer begins."""

    prompt: str
    answer: str
    question: str
    """The prompt's last line, without the worked examples before it."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """What the reward needs beside the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Problems and their reward.

    make: a problem from a random number generator. reward: of a completion's text and its problem, in [0, 1], or None
    where it cannot be told. max_tokens: that an answer needs at most; it ends with a line.
    """

    name: str
    summary: str
    make: Callable[[random.Random], Problem]
    reward: Callable[[str, Problem], float | None]
    max_tokens: int = 8

    def held_out(self, num_problems: int, seed: int) -> list[Problem]:
        """Problems to measure with, no question twice as far as there are so many."""
        rng, found = random.Random(seed + _HELD_OUT), dict[str, Problem]()
        for _ in range(50 * num_problems):
            problem = self.make(rng)
            found.setdefault(problem.question, problem)
            if len(found) == num_problems:
                break
        return list(found.values())

    def training(self, num_problems: int, seed: int, held_out: list[Problem]) -> list[Problem]:
        """Problems to train on, none of whose questions is held out. Raises ConfigError where that leaves none."""
        kept_back = {problem.question for problem in held_out}
        rng, problems = random.Random(seed), list[Problem]()
        for _ in range(50 * num_problems):
            problem = self.make(rng)
            if problem.question not in kept_back:
                problems.append(problem)
            if len(problems) == num_problems:
                return problems
        raise ConfigError(
            f"task {self.name!r}: has too few questions for {len(kept_back)} held-out ones and {num_problems} to train "
            "on; hold out fewer"
        )


def task_named(name: str) -> Task:
    """The task of this name: one of `TASKS`, or reasoning-gym:DATASET. Raises ConfigError naming those there are."""
    if name in TASKS:
        return TASKS[name]
    if name.startswith("reasoning-gym:"):
        return _reasoning_gym(name)
    raise ConfigError(f"task={name!r}: must be reasoning-gym:DATASET or one of {', '.join(TASKS)}")


def first_line(completion: str) -> str:
    """What a completion answers: its first line, without spaces around it."""
    return completion.strip().split("\n")[0].strip()


def exact(completion: str, problem: Problem) -> float:
    """1 where the answer is exactly right."""
    return float(first_line(completion) == problem.answer)


def _few_shot(
    form: str, answer: Callable[..., Any], numbers: Callable[[random.Random], tuple[int, ...]], num_shots: int
) -> Callable[[random.Random], Problem]:
    """Questions of the form `form`, after `num_shots` worked examples of the same kind."""

    def make(rng: random.Random) -> Problem:
        lines = []
        for _ in range(num_shots):
            chosen = numbers(rng)
            lines.append(f"{form.format(*chosen)} {answer(*chosen)}\n")
        chosen = numbers(rng)
        question = form.format(*chosen)
        return Problem("".join(lines) + question, str(answer(*chosen)), question)

    return make


def _digits(num_numbers: int, num_digits: int) -> Callable[[random.Random], tuple[int, ...]]:
    low, high = (1 if num_digits == 1 else 10 ** (num_digits - 1)), 10**num_digits - 1
    return lambda rng: tuple(rng.randint(low, high) for _ in range(num_numbers))


def _descending(num_digits: int) -> Callable[[random.Random], tuple[int, ...]]:
    numbers = _digits(2, num_digits)
    return lambda rng: tuple(sorted(numbers(rng), reverse=True))


def _in_brackets(completion: str, problem: Problem) -> float:
    """Half a point for a number in brackets and nothing else, half for the right one first."""
    line = first_line(completion)
    number = re.search(r"\d+", line)
    right = number is not None and number.group() == problem.details["number"]
    return 0.5 * (re.fullmatch(r"\[\d+\]", line) is not None) + 0.5 * right


def _bracketed(rng: random.Random) -> Problem:
    a, b = _digits(2, 1)(rng)
    question = f"{a} + {b} ="
    return Problem(
        f"Answers stand in brackets.\n2 + 1 = [3]\n{question}", f"[{a + b}]", question, {"number": str(a + b)}
    )


def _reasoning_gym(name: str) -> Task:
    """A data set of reasoning-gym, after two worked examples of it, with its own score."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError(f"task={name!r}: needs reasoning-gym; pip install reasoning-gym") from error
    dataset = name.removeprefix("reasoning-gym:")

    def entries(rng: random.Random) -> Any:
        try:
            return reasoning_gym.create_dataset(dataset, size=3, seed=rng.randrange(2**31))
        except (ValueError, AssertionError) as error:
            raise ConfigError(f"task={name!r}: {error}") from error

    entries(random.Random(0))

    def make(rng: random.Random) -> Problem:
        three = list(entries(rng))
        shots = "".join(f"Q: {entry['question']}\nA: {entry['answer']}\n" for entry in three[:2])
        question = f"Q: {three[2]['question']}\nA:"
        return Problem(shots + question, str(three[2]["answer"]), question, {"entry": three[2]})

    scorer = entries(random.Random(0))

    def reward(completion: str, problem: Problem) -> float:
        return float(scorer.score_answer(first_line(completion), problem.details["entry"]))

    return Task(name=name, summary=f"{dataset} of reasoning-gym", make=make, reward=reward, max_tokens=64)


TASKS = {
    task.name: task
    for task in (
        Task(
            name="add-1",
            summary="sums of two numbers of one digit, after one example",
            make=_few_shot("{} + {} =", lambda a, b: a + b, _digits(2, 1), 1),
            reward=exact,
        ),
        Task(
            name="add-2",
            summary="sums of two numbers of two digits, after two examples",
            make=_few_shot("{} + {} =", lambda a, b: a + b, _digits(2, 2), 2),
            reward=exact,
        ),
        Task(
            name="subtract-2",
            summary="differences of two numbers of two digits, after two examples",
            make=_few_shot("{} - {} =", lambda a, b: a - b, _descending(2), 2),
            reward=exact,
        ),
        Task(
            name="multiply-1",
            summary="products of two numbers of one digit, after two examples",
            make=_few_shot("{} * {} =", lambda a, b: a * b, _digits(2, 1), 2),
            reward=exact,
        ),
        Task(
            name="max-2",
            summary="the larger of two numbers of two digits, after two examples",
            make=_few_shot("max({}, {}) =", max, _digits(2, 2), 2),
            reward=exact,
        ),
        Task(
            name="max-of-3",
            summary="the largest of three numbers of two digits, after two examples",
            make=_few_shot("max({}, {}, {}) =", max, _digits(3, 2), 2),
            reward=exact,
        ),
        Task(
            name="swap",
            summary="two numbers of two digits the other way round, after two examples",
            make=_few_shot("{} {} ->", lambda a, b: f"{b} {a}", _digits(2, 2), 2),
            reward=exact,
        ),
        Task(
            name="brackets",
            summary="sums of one-digit numbers, to be answered in brackets and nothing else",
            make=_bracketed,
            reward=_in_brackets,
        ),
    )
}
"""Tasks by name; all but reasoning-gym's need nothing but this package."""
