"""Custom logits processors: where they stand, what they see, and that a failing one ends its own request only."""

import numpy as np
import pytest
import torch
from sampler_rows import masks, open_row, sample, support

from keepmask.sampling import Sampler
from keepmask.sampling.processors import STEPS

IMPLS = ("fast", "reference")


class Each:
    """Applies a function to logits and context."""

    preserves_relative_weights = False

    def __init__(self, function):
        self.apply = function


def test_the_order_is_that_of_the_semantics():
    assert [step.__name__ for step in STEPS] == [
        "ban_token_ids",
        "add_logit_bias",
        "apply_penalties",
        "ban_bad_words",
        "run_processors",
        "force_thinking_end",
    ]


@pytest.mark.parametrize("impl", IMPLS)
def test_processors_run_in_the_order_given_after_the_bans(impl):
    seen = []

    def add_one(logits, context):
        seen.append(logits.clone())
        return logits + 1

    def double(logits, context):
        return logits * 2

    sampler = Sampler(masks(4, processors=(Each(add_one), Each(double))), impl=impl)
    row = open_row(sampler, logit_bias={0: 5.0}, bad_words=[[1]], allowed_token_ids=[0, 1, 2], top_k=1)
    batch = sample(sampler, [[0.0, 9.0, 2.0, 9.0]], [row])
    assert seen[0].tolist() == [5.0, -np.inf, 2.0, -np.inf]
    assert batch.token_ids.tolist() == [0]


@pytest.mark.parametrize("impl", IMPLS)
def test_a_processor_sees_its_own_completion_and_cannot_write_to_it(impl):
    def check(logits, context):
        assert (context.prompt_token_ids.tolist(), context.output_token_ids.tolist()) == ([1, 2], [3])
        assert context.params.top_k == 2
        with pytest.raises(ValueError, match="read-only"):
            context.output_token_ids[0] = 0
        return logits

    sampler = Sampler(masks(5, processors=(Each(check),)), impl=impl)
    assert not sample(sampler, [np.arange(5)], [open_row(sampler, prompt=[1, 2], output=[3], top_k=2)]).errors


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("result", "told"),
    [
        (lambda logits: 1 / 0, "Each failed: ZeroDivisionError"),
        (lambda logits: None, "returned NoneType"),
        (lambda logits: logits[:3], r"returned \[3\] torch.float32; it must return \[5\]"),
        (lambda logits: logits.double(), r"returned \[5\] torch.float64"),
        (lambda logits: logits * torch.nan, "NaN or \\+inf"),
        (lambda logits: logits * -torch.inf, "no token is left|NaN"),
    ],
)
def test_a_processor_that_fails_ends_its_request_only(impl, result, told):
    def fail_for_seven(logits, context):
        return result(logits) if context.prompt_token_ids[0] == 2 else logits

    sampler = Sampler(masks(5, processors=(Each(fail_for_seven),)), impl=impl)
    rows = [open_row(sampler, prompt=[p], top_k=2, logprobs=1) for p in (1, 2, 3)]
    batch = sample(sampler, [np.arange(1, 6)] * 3, rows)
    assert list(batch.errors) == [1]
    with pytest.raises(ValueError, match=told):
        raise batch.errors[1]
    assert batch.token_ids[1] == -1
    assert batch.logprobs.row_logprobs(1) is None
    assert support(batch, 0) == support(batch, 2) == [3, 4]


@pytest.mark.parametrize("impl", IMPLS)
def test_a_processor_cannot_change_the_models_logits_or_a_neighbours(impl):
    def zero(logits, context):
        return logits.zero_()

    logits = np.asarray([[0.0, 9.0, 1.0], [3.0, 0.0, 0.0]], np.float32)
    sampler = Sampler(masks(3, processors=(Each(zero),)), impl=impl)
    head = torch.tensor(logits)
    sample(sampler, head, [open_row(sampler), open_row(sampler)])
    assert head.tolist() == logits.tolist()
