"""The section of a report that lists single tokens, each linked to its place in the text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from keepmask.report.excerpt import Excerpt, token_anchor
from keepmask.report.figures import Metrics, TokenPlace
from keepmask.report.number_tables import count

__all__ = ["NUM_TOKENS", "widest_table", "worst_section"]

NUM_TOKENS = 8
"""Tokens in one list."""


def worst_section(metrics: Metrics, excerpt: Excerpt) -> str:
    """Where the mismatch is largest, before and after replay; "" without scores."""
    lists = (
        ("Largest mismatch over the full vocabulary", metrics.worst_full(NUM_TOKENS)),
        ("Largest mismatch left after replay", metrics.worst_replayed(NUM_TOKENS)),
    )
    tables = [_table(f"<caption>{caption}</caption>", places, excerpt, scored=True) for caption, places in lists]
    if not any(tables):
        return ""
    return f'<section><h2>Where the mismatch is</h2><div class="columns">{"".join(tables)}</div></section>'


def widest_table(metrics: Metrics, excerpt: Excerpt) -> str:
    """The tokens with the widest supports; "" without any."""
    return _table("", metrics.widest(NUM_TOKENS), excerpt, scored=False)


def _table(caption: str, places: Sequence[TokenPlace], excerpt: Excerpt, *, scored: bool) -> str:
    if not places:
        return ""
    names = ["token", "support", *(["full", "replayed"] if scored else [])]
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    rows = "".join(_row(place, excerpt, scored=scored) for place in places)
    return f'<table class="worst">{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _row(place: TokenPlace, excerpt: Excerpt, *, scored: bool) -> str:
    where = f"completion {place.rollout + 1}, token {place.position + 1}"
    token = excerpt.text_of(excerpt.token_at(place.rollout, place.position)).replace("\n", "")
    text = f"<s>{escape(excerpt.context(place.rollout, place.position))}</s><b>{escape(token)}</b>"
    if excerpt.holds(place.rollout, place.position):
        text = f'<a href="#{token_anchor(place.rollout, place.position)}" title="{where}">{text}</a>'
    else:
        text = f'<span title="{where}, not among the texts below">{text}</span>'
    size = "" if place.support_size is None else count(place.support_size)
    ratios = (place.log_ratio_full, place.log_ratio_replayed) if scored else ()
    return f"<tr><td>{text}</td><td>{size}</td>{''.join(f'<td>{_ratio(value)}</td>' for value in ratios)}</tr>"


def _ratio(log_ratio: float | None) -> str:
    """exp(log_ratio), with enough digits to tell it from 1."""
    if log_ratio is None:
        return ""
    ratio = math.exp(min(log_ratio, 700.0))
    return f"{ratio:.3f}" if abs(log_ratio) > 5e-3 else f"{ratio:.6f}"
