"""The text of completions: each token a span shaded by its support, and the supports as data for the page's script."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from keepmask.outputs import Rollout
from keepmask.report.plots import size_bin

__all__ = ["Excerpt", "token_anchor", "visible"]

_MAX_SHOWN_IDS = 14  # ids of one support that the page lists; the rest are summed
_CONTEXT_CHARS = 28
_PROBABILITY_UNIT = 1e-4  # probabilities are whole multiples of it in the page's data
_MASS_STEPS = (0.999, 0.99, 0.97, 0.95, 0.9, 0.8, 0.6)  # kept mass, from the lightest shade to the darkest

# Characters that would be invisible, or reorder the text around them, are shown by a picture or their code point.
_PICTURES = {code: chr(0x2400 + code) for code in range(0x20)} | {0x7F: "␡", ord("\n"): "↵\n", ord("\t"): "⇥\t"}
_PICTURES |= {
    code: f"⟨{code:04X}⟩"
    for first, last in (
        (0x80, 0x9F),  # C1 controls
        (0xAD, 0xAD),  # soft hyphen
        (0x61C, 0x61C),  # Arabic letter mark
        (0x200B, 0x200F),  # zero-width and direction marks
        (0x2028, 0x202E),  # separators and direction overrides
        (0x2060, 0x206F),  # invisible operators and isolates
        (0xFEFF, 0xFEFF),  # byte order mark
    )
    for code in range(first, last + 1)
}
_PICTURES |= dict.fromkeys(range(0xD800, 0xE000), "�")


def visible(text: str) -> str:
    """The text with every character that could not be seen, or would reorder others, replaced by one that can."""
    return text.translate(_PICTURES)


def token_anchor(rollout: int, position: int) -> str:
    """The id of a token's element."""
    return f"t{rollout}-{position}"


class Excerpt:
    """The completions whose text is on the page, and what the page's script needs to show their supports."""

    def __init__(
        self,
        rollouts: Sequence[Rollout],
        token_text: Mapping[int, str],
        *,
        max_rollouts: int,
        max_tokens: int,
        also: Iterable[int] = (),
    ) -> None:
        self._rollouts = rollouts
        self._token_text = token_text
        self.shown = _first(rollouts, max_rollouts, max_tokens)
        self.num_first = len(self.shown)
        extra = sorted({index for index in also if index not in self.shown})
        self.shown += [index for index in extra if rollouts[index].token_ids.size <= max_tokens // 4]
        self._max_tokens = max_tokens
        self._texts: dict[int, int] = {}

    def text_of(self, token_id: int) -> str:
        """The text of a token, visible; its id where the file has no text for it."""
        text = self._token_text.get(token_id)
        return f"⟨{token_id}⟩" if text is None else visible(text) or "∅"

    def holds(self, rollout: int, position: int) -> bool:
        """Whether the token has its place on the page."""
        return rollout in self.shown and position < self._max_tokens

    def num_hidden(self, rollout: int) -> int:
        """Tokens of a shown completion beyond what the page takes."""
        return max(0, self._rollouts[rollout].token_ids.size - self._max_tokens)

    def token_at(self, rollout: int, position: int) -> int:
        """The id drawn there."""
        return int(self._rollouts[rollout].token_ids[position])

    def context(self, rollout: int, position: int, num_tokens: int = 8) -> str:
        """The text just before a token."""
        before = self._rollouts[rollout].token_ids[max(0, position - num_tokens) : position].tolist()
        text = "".join(map(self.text_of, before)).replace("\n", "")
        return text if len(text) <= _CONTEXT_CHARS else f"…{text[1 - _CONTEXT_CHARS :]}"

    def spans(self, rollout: int) -> str:
        """The completion as HTML, one span a token: class s<shade> by support size, m<shade> by kept mass."""
        tokens = self._rollouts[rollout].token_ids[: self._max_tokens].tolist()
        sizes, masses = self._size_classes(rollout), self._mass_classes(rollout)
        return "".join(
            f'<span id="{token_anchor(rollout, t)}" class="{size}{mass}">{escape(self.text_of(token_id))}</span>'
            for t, (token_id, size, mass) in enumerate(zip(tokens, sizes, masses, strict=False))
        )

    def data(self) -> dict[str, Any]:
        """What the script shows: `texts`, the distinct (id, text) pairs, and by rollout the columns of its tokens."""
        columns = {str(index): self._columns(index) for index in self.shown}
        texts = [[token_id, self.text_of(token_id)] for token_id in self._texts]
        return {"unit": _PROBABILITY_UNIT, "texts": texts, "rollouts": columns}

    def _columns(self, rollout: int) -> dict[str, Any]:
        item = self._rollouts[rollout]
        tokens = item.token_ids[: self._max_tokens].tolist()
        columns: dict[str, Any] = {"drawn": [self._text_index(token_id) for token_id in tokens]}
        if item.sampling_mask is not None:
            counts = item.sampling_mask.counts[: len(tokens)].tolist()
            columns |= {"sizes": counts, "supports": [self._support(item, t) for t in range(len(tokens))]}
        for name, values in (
            ("logprobs", item.logprobs),
            ("replayed", item.policy_logprobs),
            ("full", item.policy_full_logprobs),
        ):
            if values is not None:
                columns[name] = [_rounded(value) for value in values[: len(tokens)].tolist()]
        return columns

    def _support(self, rollout: Rollout, t: int) -> list[int]:
        """Likely ids first: [text, probability, text, probability, ...], -1 for an unknown probability."""
        assert rollout.sampling_mask is not None
        ids = rollout.sampling_mask.row(t)
        if ids is None:
            return []
        logprobs = rollout.sampling_mask.row_logprobs(t)
        drawn = int(rollout.token_ids[t])
        order = np.arange(ids.size) if logprobs is None else np.argsort(-logprobs, kind="stable")
        shown = order[:_MAX_SHOWN_IDS].tolist()
        shown += [i for i in np.flatnonzero(ids == drawn).tolist() if i not in shown]
        pairs = []
        for i in shown:
            share = -1 if logprobs is None else round(float(np.exp(logprobs[i])) / _PROBABILITY_UNIT)
            pairs += [self._text_index(int(ids[i])), share]
        return pairs

    def _text_index(self, token_id: int) -> int:
        return self._texts.setdefault(token_id, len(self._texts))

    def _size_classes(self, rollout: int) -> list[str]:
        item = self._rollouts[rollout]
        if item.sampling_mask is None:
            return ["u"] * item.token_ids.size
        return ["sv" if size == 0 else f"s{size_bin(size)}" for size in item.sampling_mask.counts.tolist()]

    def _mass_classes(self, rollout: int) -> list[str]:
        item = self._rollouts[rollout]
        if item.policy_logprobs is None or item.policy_full_logprobs is None:
            return [""] * item.token_ids.size
        kept = np.exp(item.policy_full_logprobs.astype(np.float64) - item.policy_logprobs)
        return [f" m{shade}" for shade in (kept[:, None] < np.array(_MASS_STEPS)).sum(1).tolist()]


def mass_labels() -> list[str]:
    """What the shades by kept mass mean, lightest first."""
    highs = ["1", *(f"{step:g}" for step in _MASS_STEPS)]
    return [f"≥ {step:g}" for step in _MASS_STEPS] + [f"< {highs[-1]}"]


def inline_json(value: Any) -> str:
    """JSON that may stand inside a script element: no character in it can end the element or the text."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _first(rollouts: Sequence[Rollout], max_rollouts: int, max_tokens: int) -> list[int]:
    """Indices of the first rollouts, at least one, within both limits."""
    ends = np.cumsum([rollout.token_ids.size for rollout in rollouts[:max_rollouts]])
    return list(range(max(int((ends <= max_tokens).sum()), min(1, len(rollouts), max_rollouts))))


def _rounded(value: float) -> float | None:
    return round(value, 6) if np.isfinite(value) else None
