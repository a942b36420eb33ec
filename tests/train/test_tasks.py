"""Tasks: verifiable rewards, held-out questions that are never trained on."""

import random
import sys
import types

import pytest

from keepmask.errors import ConfigError
from keepmask.train.tasks import TASKS, Problem, task_named


@pytest.mark.parametrize("name", TASKS)
def test_the_answer_is_rewarded_and_nothing_else_is(name):
    task = TASKS[name]
    for seed in range(20):
        problem = task.make(random.Random(seed))
        assert task.reward(f" {problem.answer}\nand more", problem) == 1
        assert task.reward(f" {problem.answer}7\n", problem) < 1
        assert task.reward("", problem) == 0
        assert problem.prompt.endswith(problem.question)


ARITHMETIC = {
    "add-1": lambda a, b: a + b,
    "add-2": lambda a, b: a + b,
    "subtract-2": lambda a, b: a - b,
    "multiply-1": lambda a, b: a * b,
    "max-2": max,
    "max-of-3": max,
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_answers_and_worked_examples_are_right(name):
    for seed in range(20):
        problem = TASKS[name].make(random.Random(seed))
        lines = f"{problem.prompt} {problem.answer}".splitlines()
        for line in lines:
            left, right = line.split("=")
            numbers = [int(word) for word in "".join(c if c.isdigit() else " " for c in left).split()]
            assert int(right) == ARITHMETIC[name](*numbers)


def test_held_out_questions_are_not_trained_on():
    task = TASKS["add-1"]
    held_out = task.held_out(30, seed=3)
    questions = {problem.question for problem in held_out}
    assert len(questions) == 30
    training = task.training(200, 3, held_out)
    assert len(training) == 200
    assert not questions & {problem.question for problem in training}
    assert task.held_out(30, seed=3) == held_out


def test_holding_out_every_question_is_refused():
    task = TASKS["add-1"]
    with pytest.raises(ConfigError, match="task 'add-1': has too few questions for 81 held-out ones"):
        task.training(10, 0, task.held_out(1000, 0))


def test_brackets_give_half_for_the_form_and_half_for_the_number():
    problem = Problem("", "[7]", "3 + 4 =", {"number": "7"})
    reward = TASKS["brackets"].reward
    assert [reward(text, problem) for text in ("[7]", "[8]", " 7", "[7] yes", "seven")] == [1.0, 0.5, 0.5, 0.5, 0.0]


def test_an_unknown_task_names_those_there_are():
    with pytest.raises(ConfigError, match="task='sum': must be reasoning-gym:DATASET or one of add-1, add-2"):
        task_named("sum")


def test_data_sets_of_reasoning_gym_are_wrapped(monkeypatch):
    class Entries(list):
        def score_answer(self, answer, entry):
            return 0.5 if answer == entry["answer"] else 0.0

    def create_dataset(name, *, size, seed):
        if name != "sums":
            raise ValueError(f"Dataset '{name}' not registered")
        return Entries({"question": f"{seed} + {i}?", "answer": str(seed + i)} for i in range(size))

    monkeypatch.setitem(sys.modules, "reasoning_gym", types.SimpleNamespace(create_dataset=create_dataset))
    task = task_named("reasoning-gym:sums")
    problem = task.make(random.Random(1))
    assert problem.prompt.count("A:") == 3
    assert task.reward(f" {problem.answer}\n", problem) == 0.5
    assert task.reward(" no\n", problem) == 0.0
    with pytest.raises(ConfigError, match="task='reasoning-gym:other': Dataset 'other' not registered"):
        task_named("reasoning-gym:other")


def test_reasoning_gym_is_asked_for_by_name_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match="needs reasoning-gym; pip install reasoning-gym"):
        task_named("reasoning-gym:sums")
