import re

import numpy as np
import pytest

from keepmask.report.excerpt import Excerpt
from keepmask.report.figures import measure
from keepmask.report.worst import NUM_TOKENS, widest_table, worst_section
from made_rollouts import made_rollout, made_rollouts


def drawn(rollouts, make, **limits):
    excerpt = Excerpt(rollouts, {}, **({"max_rollouts": 100, "max_tokens": 1000} | limits))
    return make(measure(rollouts), excerpt)


def test_both_lists_start_with_the_largest_mismatch():
    logprobs = made_rollout().logprobs
    full, replayed = logprobs.copy(), logprobs.copy()
    full[3] -= np.float32(np.log(4))
    replayed[5] += np.float32(np.log(2))
    html = drawn([made_rollout(policy_logprobs=replayed, policy_full_logprobs=full)], worst_section)
    tables = html.split("<table")[1:]
    assert [re.search(r'href="#([^"]+)"', table)[1] for table in tables] == ["t0-3", "t0-5"]
    assert re.findall(r"<td>([\d.]+)</td>", tables[0])[1:3] == ["0.250", "1.000000"]
    assert re.findall(r"<td>([\d.]+)</td>", tables[1])[1:3] == ["1.000000", "2.000"]


def test_lists_have_a_few_tokens():
    html = drawn(made_rollouts(), worst_section)
    assert html.count("<td><a ") == 2 * NUM_TOKENS


def test_a_token_whose_text_is_not_on_the_page_is_not_a_link():
    html = drawn(made_rollouts(num_requests=3, n=1), worst_section, max_tokens=12)
    assert "not among the texts below" in html
    assert set(re.findall(r'href="#t(\d+)-', html)) <= {"0"}


def test_without_scores_there_is_no_mismatch_but_the_widest_supports():
    rollouts = made_rollouts(scored=False)
    assert drawn(rollouts, worst_section) == ""
    sizes = [int(size) for size in re.findall(r"<td>(\d+)</td>", drawn(rollouts, widest_table))]
    assert sizes == sorted((len(row) for r in rollouts for row in r.sampling_mask.token_ids), reverse=True)[:NUM_TOKENS]


@pytest.mark.parametrize("make", [worst_section, widest_table])
def test_nothing_is_drawn_for_no_rollouts(make):
    assert drawn([], make) == ""
