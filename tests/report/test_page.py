import base64
import hashlib
import json
import os
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from keepmask.mask import SamplingMask
from keepmask.report import write_report
from made_rollouts import METADATA, made_rollout, made_rollouts, token_text

TEXTS = dict(enumerate(token_text(range(400))))
METADATA = {**METADATA, "token_text": TEXTS}


class Page(HTMLParser):
    """The parts of a page that tests ask about, as a browser's parser would find them."""

    VOID = frozenset({"meta", "link", "input", "br"})

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.tags, self.open, self.scripts, self.text, self.ids = [], [], [], [], {}
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append((tag, attributes))
        if tag == "script":
            self.scripts.append([attributes, ""])
        if "id" in attributes:
            assert attributes["id"] not in self.ids
            self.ids[attributes["id"]] = ""
        if tag not in self.VOID:
            self.open.append((tag, attributes.get("id")))

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        opened, _ = self.open.pop()
        assert opened == tag, f"</{tag}> closes <{opened}>"

    def handle_data(self, data):
        if self.open and self.open[-1][0] == "script":
            self.scripts[-1][1] += data
        elif self.open and self.open[-1][0] != "style":
            self.text.append(data)
            if self.open[-1][1] is not None:
                self.ids[self.open[-1][1]] += data

    @property
    def data(self):
        return json.loads(next(text for attributes, text in self.scripts if attributes.get("id") == "data"))

    def attributes(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture
def page_of(tmp_path):
    def page(rollouts, **options):
        path = write_report(tmp_path / "report.html", rollouts, **({"metadata": METADATA} | options))
        html = path.read_text("utf-8")
        parsed = Page(html)
        assert not parsed.open, f"left open: {parsed.open}"
        parsed.html, parsed.words = html, " ".join("".join(parsed.text).split())
        return parsed

    return page


def test_a_scored_run_has_headline_charts_numbers_tokens_and_text(page_of):
    page = page_of(made_rollouts())
    assert page.attributes("html") == [{"lang": "en"}]
    assert "tiny" in page.words
    assert "6 completions of 3 prompts" in page.words
    assert "72 tokens" in page.words
    assert "top_k 60" in page.words
    assert len(page.attributes("svg")) == 4
    for heading in ("All numbers", "Where the mismatch is", "The text, token by token"):
        assert heading in page.words
    for rollout in made_rollouts():
        assert rollout.prompt in page.words


def test_the_tokens_on_the_page_spell_the_completions(page_of):
    rollouts = made_rollouts()
    page = page_of(rollouts)
    for index, rollout in enumerate(rollouts):
        spelled = "".join(page.ids[f"t{index}-{t}"] for t in range(rollout.token_ids.size))
        assert spelled.replace("↵\n", "\n") == rollout.text


def test_the_page_loads_nothing_and_runs_nothing_but_its_own(page_of):
    page = page_of(made_rollouts())
    loading = [attributes for _, attributes in page.tags if {"src", "srcset", "data", "action"} & attributes.keys()]
    assert loading == []
    assert [link["href"] for link in page.attributes("link")] == ["data:,"]
    assert all(link["href"].startswith("#") for link in page.attributes("a"))
    assert "@import" not in page.html
    assert not re.search(r"url\(", page.html)
    (policy,) = [meta["content"] for meta in page.attributes("meta") if "http-equiv" in meta]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_the_policy_names_the_hashes_of_the_script_and_the_style(page_of):
    page = page_of(made_rollouts())
    style = re.search(r"<style>(.*?)</style>", page.html, re.S)[1]
    script = next(text for attributes, text in page.scripts if not attributes)
    (policy,) = [meta["content"] for meta in page.attributes("meta") if "http-equiv" in meta]
    for text in (style, script):
        assert base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() in policy


HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "</style><svg onload=alert(1)>",
    "\"><b onmouseover='alert(1)'>",
    "&lt;script&gt;<!--",
    "]]>\u2028\u2029\0\ud800",
    "\u202e<a href='javascript:alert(1)'>x</a>",
]


def test_text_of_a_model_is_inert_wherever_it_appears(page_of):
    texts = dict(enumerate(HOSTILE))
    tokens = np.arange(len(HOSTILE), dtype=np.int32)
    hostile = made_rollout(
        "</h3><script>alert(2)</script>",
        num_tokens=len(HOSTILE),
        token_ids=tokens,
        sampling_mask=SamplingMask(np.tile(tokens, len(HOSTILE)), np.arange(len(HOSTILE) + 1) * len(HOSTILE)),
        prompt="".join(HOSTILE),
        text="".join(HOSTILE),
        sampling_params={"top_k": "<script>alert(3)</script>"},
        finish_reason="<script>alert(4)</script>",
    )
    plain = page_of([made_rollout(num_tokens=len(HOSTILE))], metadata={"model": "m", "token_text": {}})
    page = page_of(
        [hostile],
        metadata={"model": "<script>alert(5)</script>", "dtype": "<script>", "token_text": texts},
        table={"<script>alert(6)</script>": 1.0, "num_tokens": 7},
    )
    assert len(page.scripts) == len(plain.scripts) == 2
    assert {tag for tag, _ in page.tags} <= {tag for tag, _ in plain.tags}
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert page.ids["t0-0"] == HOSTILE[0]
    assert page.ids["t0-1"] == HOSTILE[1]
    shown = [text for _, text in page.data["texts"]]
    assert HOSTILE[0] in shown


def test_the_script_uses_no_markup_of_its_data(page_of):
    script = next(text for attributes, text in page_of(made_rollouts()).scripts if not attributes)
    for sink in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "Function(",
        'setAttribute("on',
    ):
        assert sink not in script


def test_the_worst_tokens_link_to_their_places(page_of):
    page = page_of(made_rollouts(num_requests=20, n=1), max_rollouts=2)
    links = [link["href"][1:] for link in page.attributes("a")]
    assert len(links) == 16
    assert all(link in page.ids for link in links)


def test_a_run_without_scores_has_supports_and_the_widest_of_them(page_of):
    page = page_of(made_rollouts(scored=False))
    assert len(page.attributes("svg")) == 1
    assert "Where the choice was widest" in page.words
    assert "Shade by" not in page.words
    assert "replayed" not in page.words
    assert page.data["rollouts"]["0"]["supports"]


def test_a_run_without_masks_has_its_text(page_of):
    page = page_of(made_rollouts(scored=False, sampling_mask=None))
    assert page.attributes("svg") == []
    assert page.ids["t0-0"]


def test_no_rollouts_make_a_page_that_says_so(page_of):
    assert "0 completions of 0 prompts" in page_of([]).words


def test_a_large_run_shows_its_first_texts_says_so_and_counts_all(page_of):
    page = page_of(made_rollouts(num_requests=30, n=1, num_tokens=4), max_rollouts=5)
    shown = page.data["rollouts"]
    assert {"0", "1", "2", "3", "4"} <= shown.keys()
    assert len(shown) < 30
    assert f"the text of the first 5 of 30 completions and of {len(shown) - 5} more named above" in page.words
    assert "120 tokens" in page.words


def test_page_size_stays_bounded_however_large_the_run(tmp_path):
    rollouts = made_rollouts(num_requests=1, n=1, num_tokens=400) * 500
    path = write_report(tmp_path / "r.html", rollouts, metadata=METADATA, max_rollouts=10**6)
    assert path.stat().st_size < 8_000_000


def test_parameters_that_differ_are_said_to_vary(page_of):
    words = page_of([made_rollout("0"), made_rollout("1", sampling_params={"top_p": 0.9})]).words
    assert "top_k varies" in words
    assert "top_p varies" in words
    assert "temperature 1" in words


def test_a_prompt_without_text_is_spelled_from_its_ids(page_of):
    assert "".join(token_text([0, 1, 2])) in page_of([made_rollout(prompt=None)]).words


def test_numbers_given_are_the_numbers_shown(page_of):
    page = page_of(
        made_rollouts(), table={"ratio_full_mean": 0.1234, "ratio_replayed_mean": 0.9876, "tokens_per_s": 812.3}
    )
    assert "0.1234" in page.words
    assert "0.9876" in page.words
    assert "812" in page.words


def test_the_same_run_makes_the_same_page(tmp_path):
    pages = [write_report(tmp_path / name, made_rollouts(), metadata=METADATA).read_bytes() for name in ("a", "b")]
    assert pages[0] == pages[1]


def test_the_page_can_be_read_by_keyboard_and_reader(page_of):
    page = page_of(made_rollouts())
    assert all(svg["role"] == "img" and svg["aria-label"] for svg in page.attributes("svg"))
    assert [card["role"] for card in page.attributes("div") if card.get("id") == "card"] == ["tooltip"]
    script = next(text for attributes, text in page.scripts if not attributes)
    for key in ("ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End", "Escape", "aria-describedby"):
        assert key in script


def test_an_old_page_stays_when_the_new_one_cannot_be_written(tmp_path):
    (tmp_path / "report.html").write_text("old")
    with pytest.raises(FileNotFoundError, match=r"cannot write .*absent/report\.html"):
        write_report(tmp_path / "absent" / "report.html", [], metadata={})
    assert os.listdir(tmp_path) == ["report.html"]
