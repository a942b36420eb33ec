"""`write_report`: rollouts as one HTML page that needs nothing else."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from keepmask import __version__
from keepmask.outputs import Rollout
from keepmask.report.completions import completions_section
from keepmask.report.excerpt import Excerpt, inline_json, visible
from keepmask.report.figures import Metrics, measure
from keepmask.report.number_tables import count, number, numbers_table, plural, ratio_table, share
from keepmask.report.plots import mass_chart, ratio_histogram, sequence_chart, size_histogram
from keepmask.report.worst import NUM_TOKENS, widest_table, worst_section
from keepmask.wire.atomic_files import write_atomically

__all__ = ["document", "figure", "tile", "write_report"]

_MAX_TOKENS = 30_000  # tokens whose supports are embedded, about 4 MB of page
_PARAMS = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "max_tokens": 16,
}
"""Sampling parameters the header names, with their defaults."""


def write_report(
    path: str | Path,
    rollouts: Sequence[Rollout],
    *,
    metadata: Mapping[str, Any],
    table: Mapping[str, float] | None = None,
    max_rollouts: int = 200,
) -> Path:
    """Write the report page of these rollouts, whole or not at all, and return its path.

    metadata: as `read_rollouts` returns it; `model`, `sampling_params` and `token_text` are shown. table: the numbers
    to show, by the names of `Mismatch.table`; by default measured from the rollouts' own scores. max_rollouts: how many
    completions' text is embedded; every number and chart is over all of them.

    Raises MaskError when a rollout's scores are not one finite number a token, OSError when the file cannot be written.
    """
    path = Path(path)
    metrics = measure(rollouts, table=table)
    named = [*metrics.worst_full(NUM_TOKENS), *metrics.worst_replayed(NUM_TOKENS)] or metrics.widest(NUM_TOKENS)
    excerpt = Excerpt(
        rollouts,
        metadata.get("token_text") or {},
        max_rollouts=max_rollouts,
        max_tokens=_MAX_TOKENS,
        also=[place.rollout for place in named],
    )
    body = [
        _header(rollouts, metadata, metrics),
        _headline(metrics),
        _charts(metrics, excerpt),
        _numbers(metrics),
        worst_section(metrics, excerpt),
        completions_section(rollouts, excerpt),
        f"<footer>keepmask {escape(__version__)} · nothing on this page is loaded from elsewhere</footer>",
    ]
    page = document(f"{_model(metadata)} · keepmask report", "".join(body), excerpt.data())
    with write_atomically(path) as stream:
        stream.write(page.encode("utf-8", "replace"))
    return path


def document(title: str, body: str, data: Any) -> str:
    """The page. Its policy lets it run its own script and style, known by hash, and nothing else."""
    assets = files("keepmask.report") / "assets"
    style, script = ((assets / name).read_text("utf-8") for name in ("report.css", "report.js"))
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,"><title>{escape(title)}</title>'
        f"<style>{style}</style></head><body><main>{body}</main>"
        '<div id="card" role="tooltip" hidden></div>'
        f'<script type="application/json" id="data">{inline_json(data)}</script>'
        f"<script>{script}</script></body></html>\n"
    )


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _model(metadata: Mapping[str, Any]) -> str:
    return visible(str(metadata.get("model") or "rollouts"))


def _header(rollouts: Sequence[Rollout], metadata: Mapping[str, Any], metrics: Metrics) -> str:
    facts = [
        f"{count(metrics.num_rollouts)} completion{plural(metrics.num_rollouts)} of "
        f"{count(metrics.num_prompts)} prompt{plural(metrics.num_prompts)}",
        f"{count(metrics.num_tokens)} token{plural(metrics.num_tokens)}",
        *_shared_params(rollouts),
        *(f"{name} {metadata[name]}" for name in ("dtype",) if name in metadata),
    ]
    items = "".join(f"<li>{escape(visible(fact))}</li>" for fact in facts)
    return (
        '<header><p class="brand">keepmask <span>rollout report</span></p>'
        '<button id="theme" type="button" hidden>Theme: auto</button>'
        f'<h1>{escape(_model(metadata))}</h1><ul class="facts">{items}</ul></header>'
    )


def _shared_params(rollouts: Sequence[Rollout]) -> list[str]:
    """The sampling parameters, as all rollouts have them; "varies" where they differ."""
    facts = []
    for name, default in _PARAMS.items():
        values = [rollout.sampling_params.get(name, default) for rollout in rollouts]
        if values and any(value != values[0] for value in values):
            facts.append(f"{name} varies")
        elif values and (values[0] != default or name == "temperature"):
            facts.append(f"{name} {values[0]:g}" if isinstance(values[0], (int, float)) else f"{name} {values[0]}")
    return facts


def _headline(metrics: Metrics) -> str:
    table = metrics.table
    tiles = []
    if "ratio_replayed_mean" in table:
        tiles.append(_before_after("Importance ratio, mean", table, "ratio_{}_mean", "4"))
    if "ratio_replayed_outside_0.1" in table:
        tiles.append(_before_after("Ratio outside [0.9, 1.1]", table, "ratio_{}_outside_0.1", "%"))
    if "kept_mass_mean" in table:
        tiles.append(tile("Probability kept by the supports", number(table["kept_mass_mean"]), "mean over tokens"))
    if {"support_size_mean", "support_size_median", "support_size_p99"} <= table.keys():
        detail = f"mean {number(table['support_size_mean'], '1')}, 99 % up to {number(table['support_size_p99'], 'g')}"
        tiles.append(tile("Support size, median", number(table["support_size_median"], "g"), detail))
    if len(tiles) == 1 and "support_singleton_share" in table:
        single = share(table["support_singleton_share"])
        tiles.append(tile("Tokens with one possible id", single, "the sampler had no choice there"))
    return f'<section class="tiles" aria-label="Summary">{"".join(tiles)}</section>' if tiles else ""


def tile(label: str, value: str, detail: str) -> str:
    """One number of the summary."""
    return f'<div class="tile"><h2>{label}</h2><p class="big">{value}</p><p>{detail}</p></div>'


def _before_after(label: str, table: Mapping[str, float], name: str, form: str) -> str:
    after = f'<span class="replayed">{number(table[name.format("replayed")], form)}</span>'
    if name.format("full") not in table:
        return tile(label, after, "replayed on the supports")
    before = f'<span class="full">{number(table[name.format("full")], form)}</span>'
    return tile(label, f"{before}<i>→</i>{after}", "full vocabulary → replayed")


def _charts(metrics: Metrics, excerpt: Excerpt) -> str:
    figures = _score_figures(metrics)
    if metrics.support_sizes.size:
        figures.append(figure("How many ids the sampler could draw", "", size_histogram(metrics.support_sizes)))
    if metrics.mismatch is None and metrics.support_sizes.size:
        figures.append(figure("Where the choice was widest", "", widest_table(metrics, excerpt)))
    return f'<section class="charts" aria-label="Charts">{"".join(figures)}</section>' if figures else ""


def _score_figures(metrics: Metrics) -> list[str]:
    """What the policy's scores show; nothing where there are none."""
    mismatch = metrics.mismatch
    if mismatch is None or not len(mismatch):
        return []
    some = f", {count(len(metrics.scored))} completions" if len(metrics.scored) < metrics.num_rollouts else ""
    keys = _keys(mismatch.ratio_full is not None)
    histogram = ratio_histogram(mismatch.ratio_full, mismatch.ratio_replayed)
    figures = [figure(f"Importance ratio of each token{some}", keys, histogram)]
    if metrics.sequence_replayed is not None:
        chart = sequence_chart(metrics.sequence_full, metrics.sequence_replayed)
        figures.append(figure("Ratio of the completion so far", keys, chart))
    if mismatch.kept_mass is not None and mismatch.support_sizes is not None:
        chart = mass_chart(mismatch.support_sizes, mismatch.kept_mass)
        figures.append(figure("Probability kept by the supports", "", chart))
    return figures


def figure(title: str, keys: str, chart: str) -> str:
    """A chart under its title."""
    return f"<figure><figcaption><b>{title}</b>{keys}</figcaption>{chart}</figure>"


def _keys(has_full: bool) -> str:
    full = '<span><i class="key full"></i>full vocabulary</span>' if has_full else ""
    return f'<span class="keys">{full}<span><i class="key replayed"></i>replayed</span></span>'


def _numbers(metrics: Metrics) -> str:
    tables = ratio_table(metrics.table) + numbers_table(metrics.table)
    return f'<section><h2>All numbers</h2><div class="columns">{tables}</div></section>' if tables else ""
