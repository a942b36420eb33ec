import re

import numpy as np

from keepmask.mask import SamplingMask
from keepmask.report.completions import completions_section
from keepmask.report.excerpt import Excerpt
from made_rollouts import made_rollout, made_rollouts


def section(rollouts, **limits):
    excerpt = Excerpt(rollouts, {}, **({"max_rollouts": 100, "max_tokens": 1000} | limits))
    return completions_section(rollouts, excerpt)


def test_completions_of_one_request_share_their_prompt():
    html = section(made_rollouts(num_requests=2, n=3))
    assert html.count("<article>") == 2
    assert html.count('class="tokens"') == 6
    assert html.count("Prompt 0:") == 1


def test_a_completion_states_its_length_end_and_sequence_ratio():
    rollout = made_rollout(num_tokens=2, finish_reason="stop", sampling_mask=SamplingMask.from_lists([[1], [1, 2, 3]]))
    full = rollout.logprobs + np.log([0.5, 0.5], dtype=np.float32)
    html = section([made_rollout(num_tokens=2, finish_reason="stop", policy_full_logprobs=full)])
    assert "2 tokens · stop · support" in html
    assert "sequence ratio 0.25 over the full vocabulary" in html
    assert "support 2.0 ids a token" in section([rollout])


def test_tokens_left_out_of_a_long_completion_are_counted():
    assert "7 more tokens are not shown" in section([made_rollout(num_tokens=12)], max_tokens=5)
    assert "not shown" not in section([made_rollout(num_tokens=12)])


def test_the_legend_has_the_shades_that_occur_as_classes():
    whole = made_rollout(num_tokens=1, scored=False, sampling_mask=SamplingMask([], [0, 0]))
    assert 'swatch sv">all' in section([whole])
    assert "swatch sv" not in section(made_rollouts())
    assert len(re.findall(r"swatch m\d", section(made_rollouts()))) == 8
    assert not re.search(r"swatch m\d", section(made_rollouts(scored=False)))
