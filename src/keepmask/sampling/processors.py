"""Steps 1 to 6: everything that changes logits before temperature and filters, in their order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keepmask.errors import RequestError
from keepmask.sampling.row import SamplingRow
from keepmask.sampling.spec import LogitsProcessor, ProcessorContext, SamplerSpec
from keepmask.sampling.transfer import to_device

__all__ = [
    "STEPS",
    "ProcessedRows",
    "changes_logits",
    "changes_values",
    "may_change_logits",
    "process",
]

_log = logging.getLogger(__name__)

NEVER = float("-inf")


@dataclass(slots=True)
class ProcessedRows:
    """Logits under change and the rows they belong to. logits: [M, V] float32, changed in place."""

    logits: Tensor
    rows: Sequence[SamplingRow]
    spec: SamplerSpec
    errors: dict[int, RequestError] = field(default_factory=dict)
    """By index into `rows`."""


def changes_logits(row: SamplingRow, spec: SamplerSpec) -> bool:
    """Whether any step may change the logits of this row's next position."""
    return bool(
        spec.banned_token_ids
        or row.bans_stop_tokens
        or row.params.allowed_token_ids is not None
        or row.grammar is not None
        or row.bad_words is not None
        or changes_values(row, spec)
    )


def changes_values(row: SamplingRow, spec: SamplerSpec) -> bool:
    """Whether any step may do more to this row's next logits than ban ids."""
    forced = row.thinking is not None and row.thinking.forced_token_id is not None
    return bool(spec.processors or row.params.logit_bias or row.counts is not None or forced)


def may_change_logits(row: SamplingRow, spec: SamplerSpec) -> bool:
    """Whether any step may change the logits of this row at some position, its next or a later one."""
    return row.params.min_tokens > 0 or row.thinking is not None or changes_logits(row, spec)


def process(logits: Tensor, rows: Sequence[SamplingRow], spec: SamplerSpec) -> dict[int, RequestError]:
    """Apply `STEPS` to logits [M, V] float32 in place; returns the rows that failed, by index."""
    work = ProcessedRows(logits, rows, spec)
    for step in STEPS:
        step(work)
    return work.errors


def ban_token_ids(work: ProcessedRows) -> None:
    """allowed_token_ids, structured outputs, min_tokens, and ids banned for the whole engine."""
    for m, row in enumerate(work.rows):
        allowed = row.params.allowed_token_ids
        if allowed is not None:
            kept = to_device(np.asarray(allowed, np.int64), work.logits.device)
            values = work.logits[m, kept]
            work.logits[m] = NEVER
            work.logits[m, kept] = values
        if row.grammar is not None:
            banned = to_device(np.flatnonzero(~row.grammar.allowed()), work.logits.device)
            work.logits[m, banned] = NEVER
    if work.spec.banned_token_ids:
        banned = to_device(np.asarray(work.spec.banned_token_ids, np.int64), work.logits.device)
        work.logits.index_fill_(1, banned, NEVER)
    _ban(work, [row.stop_token_ids if row.bans_stop_tokens else () for row in work.rows])


def add_logit_bias(work: ProcessedRows) -> None:
    """z += bias."""
    for m, row in enumerate(work.rows):
        if bias := row.params.logit_bias:
            ids, values = np.fromiter(bias, np.int64, len(bias)), np.fromiter(bias.values(), np.float32, len(bias))
            work.logits[m, to_device(ids, work.logits.device)] += to_device(values, work.logits.device)


def apply_penalties(work: ProcessedRows) -> None:
    """Repetition over prompt and output (z > 0: z / r, else z * r); then frequency * count and presence over output."""
    penalised = [(m, row.params, row.counts) for m, row in enumerate(work.rows) if row.counts is not None]
    if not penalised:
        return
    lengths = [counts.ids.size for _, _, counts in penalised]
    device = work.logits.device

    def per_id(values: list[float]) -> Tensor:
        return to_device(np.repeat(np.asarray(values, np.float32), lengths), device)

    ids = to_device(np.concatenate([counts.ids for _, _, counts in penalised]), device)
    count = to_device(np.concatenate([counts.counts for _, _, counts in penalised]), device).float()
    rows = to_device(np.repeat([m for m, _, _ in penalised], lengths), device)
    repetition = per_id([params.repetition_penalty for _, params, _ in penalised])
    frequency = per_id([params.frequency_penalty for _, params, _ in penalised])
    presence = per_id([params.presence_penalty for _, params, _ in penalised])
    z = work.logits[rows, ids]
    z = torch.where(z > 0, z / repetition, z * repetition)
    work.logits[rows, ids] = z - frequency * count - presence * (count > 0)


def ban_bad_words(work: ProcessedRows) -> None:
    """Ban the last token of each word whose other tokens end the output."""
    _ban(work, [row.bad_words.banned(row.output_token_ids) if row.bad_words else () for row in work.rows])


def run_processors(work: ProcessedRows) -> None:
    """The engine's custom processors, in the order given."""
    if not work.spec.processors:
        return
    for m, row in enumerate(work.rows):
        context = ProcessorContext(row.params, _read_only(row.prompt_token_ids), _read_only(row.output_token_ids))
        try:
            work.logits[m] = _run(work.spec.processors, work.logits[m].clone(), context)
        except RequestError as error:
            work.errors[m] = error


def force_thinking_end(work: ProcessedRows) -> None:
    """Once the thinking budget is spent, only the next end-of-thinking token is left, whatever banned it."""
    for m, row in enumerate(work.rows):
        forced = None if row.thinking is None else row.thinking.forced_token_id
        if forced is not None:
            value = work.logits[m, forced].nan_to_num(neginf=0.0)
            work.logits[m] = NEVER
            work.logits[m, forced] = value


STEPS: tuple[Callable[[ProcessedRows], None], ...] = (
    ban_token_ids,
    add_logit_bias,
    apply_penalties,
    ban_bad_words,
    run_processors,
    force_thinking_end,
)
"""The order. Temperature and the filters of the profile follow."""


def _run(processors: Sequence[LogitsProcessor], logits: Tensor, context: ProcessorContext) -> Tensor:
    shape = logits.shape
    for processor in processors:
        name = type(processor).__name__
        try:
            logits = processor.apply(logits, context)
        except Exception as error:  # the request's border: user code may raise anything
            _log.warning("logits processor %s failed", name, exc_info=True)
            raise RequestError(f"logits processor {name} failed: {type(error).__name__}: {error}") from error
        if not isinstance(logits, Tensor) or logits.shape != shape or logits.dtype != torch.float32:
            came = f"{list(logits.shape)} {logits.dtype}" if isinstance(logits, Tensor) else type(logits).__name__
            raise RequestError(f"logits processor {name} returned {came}; it must return {list(shape)} torch.float32")
    return logits


def _ban(work: ProcessedRows, ids: Sequence[Sequence[int] | NDArray[np.int64]]) -> None:
    """Ban ids[m] in row m."""
    lengths = [len(row) for row in ids]
    if total := sum(lengths):
        rows = np.repeat(np.arange(len(ids)), lengths)
        flat = np.concatenate([np.asarray(row, np.int64) for row in ids if len(row)])
        assert flat.size == total
        device = work.logits.device
        work.logits[to_device(rows, device), to_device(flat, device)] = NEVER


def _read_only(array: NDArray[np.int64]) -> NDArray[np.int64]:
    view = array.view()
    view.flags.writeable = False
    return view
