import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepmask.mask import SamplingMask
from keepmask.report.excerpt import Excerpt, inline_json, visible
from made_rollouts import made_rollout, made_rollouts


def excerpt_of(*rollouts, texts=None, max_rollouts=100, max_tokens=10_000, also=()):
    return Excerpt(rollouts, texts or {}, max_rollouts=max_rollouts, max_tokens=max_tokens, also=also)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 漢 🙂", "plain é 漢 🙂"),
        ("a\nb", "a↵\nb"),
        ("\t", "⇥\t"),
        ("\0\x1b\x7f", "␀␛␡"),
        ("\u202eevil", "⟨202E⟩evil"),
        ("\u200b\u2066\ufeff\xad\x85", "⟨200B⟩⟨2066⟩⟨FEFF⟩⟨00AD⟩⟨0085⟩"),
        ("\ud800", "�"),
    ],
)
def test_what_cannot_be_seen_is_shown(text, shown):
    assert visible(text) == shown


@given(st.text())
def test_inline_json_gives_back_its_value_and_cannot_leave_its_element(text):
    encoded = inline_json({"text": text})
    assert json.loads(encoded) == {"text": text}
    assert not set("<>&") & set(encoded)
    assert encoded.isascii()


def test_each_token_is_a_span_shaded_by_its_support():
    mask = SamplingMask.from_lists([[1], [1, 2, 3], [], range(200)])
    rollout = made_rollout(num_tokens=4, scored=False, sampling_mask=mask, token_ids=np.array([1, 2, 7, 5], np.int32))
    spans = excerpt_of(rollout, texts={1: "a", 2: "<b>", 5: '"'}).spans(0)
    assert spans == (
        '<span id="t0-0" class="s0">a</span><span id="t0-1" class="s2">&lt;b&gt;</span>'
        '<span id="t0-2" class="sv">⟨7⟩</span><span id="t0-3" class="s8">&quot;</span>'
    )


def test_scored_tokens_are_also_shaded_by_the_probability_kept():
    scores = {
        "policy_logprobs": np.zeros(3, np.float32),
        "policy_full_logprobs": np.log([1, 0.96, 0.5], dtype=np.float32),
    }
    spans = excerpt_of(made_rollout(num_tokens=3, **scores)).spans(0)
    assert re.findall(r" m\d", spans) == [" m0", " m3", " m7"]


def test_a_rollout_without_a_mask_has_its_text():
    spans = excerpt_of(made_rollout(num_tokens=2, scored=False, sampling_mask=None)).spans(0)
    assert re.findall(r'class="(\w+)"', spans) == ["u", "u"]


def test_data_lists_likely_ids_first_and_always_the_drawn_one():
    probabilities = np.array([0.9, *np.full(99, 0.1 / 99)])
    mask = SamplingMask(np.arange(100), [0, 100], np.log(probabilities))
    rollout = made_rollout(num_tokens=1, scored=False, sampling_mask=mask, token_ids=np.array([99], np.int32))
    data = excerpt_of(rollout, texts={0: "first", 99: "drawn"}).data()
    columns = data["rollouts"]["0"]
    support = columns["supports"][0]
    assert columns["sizes"] == [100]
    assert data["texts"][support[0]] == [0, "first"]
    assert support[1] * data["unit"] == pytest.approx(0.9, abs=1e-4)
    assert data["texts"][support[-2]] == [99, "drawn"]
    assert support[-2] == columns["drawn"][0]
    assert len(support) < 100


def test_data_says_where_probabilities_are_unknown_and_rows_are_the_vocabulary():
    mask = SamplingMask.from_lists([[3, 4], []])
    columns = excerpt_of(made_rollout(num_tokens=2, scored=False, sampling_mask=mask)).data()["rollouts"]["0"]
    assert columns["supports"][0][1::2] == [-1, -1]
    assert columns["supports"][1] == []
    assert columns["sizes"] == [2, 0]


def test_only_the_first_rollouts_are_shown_and_those_asked_for():
    rollouts = made_rollouts(num_requests=10, n=1)
    excerpt = excerpt_of(*rollouts, max_rollouts=3, also=[7, 1])
    assert (excerpt.shown, excerpt.num_first) == ([0, 1, 2, 7], 3)
    assert list(excerpt.data()["rollouts"]) == ["0", "1", "2", "7"]
    assert excerpt.holds(7, 5)
    assert not excerpt.holds(4, 5)


def test_the_number_of_tokens_shown_is_bounded():
    rollouts = made_rollouts(num_requests=10, n=1, num_tokens=10)
    assert excerpt_of(*rollouts, max_tokens=25).shown == [0, 1]
    long = made_rollout(num_tokens=40)
    excerpt = excerpt_of(long, made_rollout("1", num_tokens=40), max_tokens=25, also=[1])
    assert excerpt.shown == [0]
    assert excerpt.num_hidden(0) == 15
    assert excerpt.spans(0).count("<span") == 25
    assert not excerpt.holds(0, 25)


def test_context_is_the_text_before_a_token_in_one_line():
    rollout = made_rollout(num_tokens=4, token_ids=np.array([1, 2, 3, 4], np.int32))
    excerpt = excerpt_of(rollout, texts={1: "x" * 60, 2: "one\n", 3: "two"})
    assert excerpt.context(0, 3).endswith("xone↵two")
    assert excerpt.context(0, 3).startswith("…x")
    assert excerpt.context(0, 0) == ""
