"""The section of a report with the text of completions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import groupby

import numpy as np

from keepmask.outputs import Rollout
from keepmask.report.excerpt import Excerpt, mass_labels, visible
from keepmask.report.number_tables import count, number, plural
from keepmask.report.plots import SIZE_BINS, size_label

__all__ = ["completions_section"]


def completions_section(rollouts: Sequence[Rollout], excerpt: Excerpt) -> str:
    """The completions of the excerpt under their prompts, with the legend of their shades."""
    note = _excerpt_note(rollouts, excerpt)
    groups = groupby(excerpt.shown, key=lambda index: (rollouts[index].request_id, rollouts[index].prompt))
    articles = "".join(_article(rollouts, list(group), excerpt, n) for n, (_, group) in enumerate(groups, 1))
    return (
        '<section class="by-size" id="texts"><h2>The text, token by token</h2>'
        "<p>Each token is shaded by how many ids could have been drawn in its place. Point at one, or move with the "
        f"arrow keys, to see them and their probabilities.{note}</p>{_legend(rollouts, excerpt)}{articles}</section>"
    )


def _excerpt_note(rollouts: Sequence[Rollout], excerpt: Excerpt) -> str:
    if len(excerpt.shown) == len(rollouts):
        return ""
    extra = len(excerpt.shown) - excerpt.num_first
    also = f" and of {count(extra)} more named above" if extra else ""
    return (
        f" <strong>Here is the text of the first {count(excerpt.num_first)} of {count(len(rollouts))} "
        f"completions{also}; every number and chart above is over all of them.</strong>"
    )


def _legend(rollouts: Sequence[Rollout], excerpt: Excerpt) -> str:
    masks = [rollouts[index].sampling_mask for index in excerpt.shown]
    steps = [(f"s{i}", size_label(i)) for i in range(len(SIZE_BINS))]
    if any(mask is not None and (mask.counts == 0).any() for mask in masks):
        steps.append(("sv", "all"))
    legend = f'<span class="scale size"><span>ids possible</span>{_swatches(steps)}</span>'
    if any(rollouts[index].policy_full_logprobs is not None for index in excerpt.shown):
        masses = [(f"m{i}", label) for i, label in enumerate(mass_labels())]
        legend += f'<span class="scale mass"><span>probability kept</span>{_swatches(masses)}</span>'
        legend = (
            '<fieldset id="shade" hidden><legend>Shade by</legend>'
            '<label><input type="radio" name="shade" value="by-size" checked>support size</label>'
            '<label><input type="radio" name="shade" value="by-mass">probability kept</label></fieldset>'
        ) + legend
    return f'<div class="legend">{legend}</div>'


def _swatches(steps: Sequence[tuple[str, str]]) -> str:
    return "".join(f'<span class="swatch {name}">{escape(label)}</span>' for name, label in steps)


def _article(rollouts: Sequence[Rollout], indices: Sequence[int], excerpt: Excerpt, n: int) -> str:
    first = rollouts[indices[0]]
    prompt = first.prompt
    if prompt is None:
        prompt = "".join(map(excerpt.text_of, first.prompt_token_ids.tolist()))
    lines = "\n".join(map(visible, prompt.split("\n")))
    request = f" <span>request {escape(visible(first.request_id))}</span>" if first.request_id else ""
    completions = "".join(_completion(rollouts[index], index, excerpt) for index in indices)
    return (
        f'<article><h3>Prompt {n}{request}</h3><div class="prompt" tabindex="0" aria-label="prompt"><div>'
        f"{escape(lines)}</div></div>{completions}</article>"
    )


def _completion(rollout: Rollout, index: int, excerpt: Excerpt) -> str:
    num_tokens = rollout.token_ids.size
    facts = [
        f"{count(num_tokens)} token{plural(num_tokens)}",
        *([rollout.finish_reason] if rollout.finish_reason else []),
    ]
    counts = np.zeros(0) if rollout.sampling_mask is None else rollout.sampling_mask.counts
    if (counts > 0).any():
        facts.append(f"support {number(float(counts[counts > 0].mean()), '1')} ids a token")
    if rollout.policy_full_logprobs is not None and rollout.logprobs is not None:
        log_ratio = rollout.policy_full_logprobs.astype(float) - rollout.logprobs
        facts.append(f"sequence ratio {math.exp(min(float(log_ratio.sum()), 700.0)):.3g} over the full vocabulary")
    cut = excerpt.num_hidden(index)
    more = f'<p class="cut">{count(cut)} more tokens are not shown.</p>' if cut else ""
    return (
        f'<div class="completion"><p class="facts">{" · ".join(map(escape, facts))}</p>'
        f'<div class="tokens" data-rollout="{index}" aria-label="completion {index + 1}">{excerpt.spans(index)}</div>'
        f"{more}</div>"
    )
