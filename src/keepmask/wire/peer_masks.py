"""Masks in the layouts of other engines and trainers.

Every reader refuses malformed input with MaskError, naming the field, and allocates no more than a small multiple of
what it was given, within `limits`. A row of no ids stands for the whole vocabulary, as in
`SamplingMask`, which is what prime-rl and slime mean by it too. Arrays may be NumPy arrays, lists, or CPU tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from keepmask.errors import MaskError
from keepmask.mask import SamplingMask
from keepmask.wire.limits import DEFAULT_LIMITS, Limits
from keepmask.wire.nested import from_lists
from keepmask.wire.peer_arrays import FLOAT32, INT32, brief, field, read_array, read_flags

__all__ = [
    "from_ids_counts",
    "from_ids_offsets",
    "from_sglang",
    "from_skyrl",
    "from_skyrl_packed",
    "from_slime",
    "from_verifiers",
    "from_vllm",
    "to_ids_counts",
    "to_skyrl",
    "to_slime",
]

SKYRL_PADDING = -1

_MASS_TOLERANCE = 1e-3  # float32 logprobs of a few thousand ids add up to one well within this


def from_ids_offsets(
    ids: object, offsets: object, logprobs: object = None, *, limits: Limits = DEFAULT_LIMITS
) -> SamplingMask:
    """CSR with offsets: row t is ids[offsets[t]:offsets[t + 1]], in any order. slime, miles and newer vLLM.

    ids [N] and offsets [T+1] integers; logprobs [N] floats, aligned with ids (miles' support_logprobs), or None.
    """
    _both_or_neither("ids", ids, "offsets", offsets)
    flat = read_array("ids", ids, INT32, limits)
    return _mask(flat, _bounds("offsets", offsets, flat.size, "ids", limits), logprobs, limits)


def from_ids_counts(
    ids: object,
    counts: object,
    logprobs: object = None,
    *,
    sampled: ArrayLike | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> SamplingMask:
    """CSR with counts: row t is the next counts[t] ids. prime-rl's transport (where arrays are int32 bytes), verifiers.

    sampled: [T] bool, for layouts aligned with a whole branch or sequence: only the rows of sampled tokens are taken,
    and a row elsewhere that holds ids is refused.
    """
    _both_or_neither("ids", ids, "counts", counts)
    flat, widths = read_array("ids", ids, INT32, limits), read_array("counts", counts, INT32, limits)
    if (negative := np.flatnonzero(widths < 0)).size:
        raise MaskError(f"counts: must be >= 0; negative at row {negative[0]}")
    total = sum(widths.tolist())  # exact: counts of 2**62 would wrap
    if total != flat.size:
        raise MaskError(f"counts: add up to {total}, but there are {flat.size} ids")
    limits.check(num_rows=widths.size, num_ids=total)
    mask = _mask(flat, np.concatenate([[0], np.cumsum(widths)]), logprobs, limits)
    if sampled is None:
        return mask
    kept = read_flags("sampled", sampled, widths.size)
    if (stray := np.flatnonzero(~kept & (widths > 0))).size:
        raise MaskError(f"counts: row {stray[0]} holds ids, but its token was not sampled ({stray.size} such rows)")
    return mask.take(np.flatnonzero(kept))


def to_ids_counts(mask: SamplingMask) -> dict[str, NDArray[np.int32]]:
    """`{"ids": [N] int32, "counts": [T] int32}`, the fields of verifiers' and prime-rl's SamplingMask."""
    return {"ids": mask.ids, "counts": mask.counts.astype(np.int32)}


def from_vllm(sampling_mask: object, logprobs: object = None, *, limits: Limits = DEFAULT_LIMITS) -> SamplingMask:
    """vLLM's `sampling_mask`: nested lists (JSON, or `SamplingMask.token_ids`), or CSR `{token_ids, offsets}`.

    logprobs: `sampling_mask_logprobs`, in the same layout; for the object form its own `logprobs` are used.
    """
    if isinstance(sampling_mask, (str, bytes)) or sampling_mask is None:
        raise MaskError(
            f"sampling_mask: must be one list of token ids a generated token, got {brief(sampling_mask)}; "
            "start vLLM with --return-sampling-mask"
        )
    token_ids = field(sampling_mask, "token_ids")
    if token_ids is None:
        token_ids, offsets = sampling_mask, field(sampling_mask, "offsets")
    else:
        offsets = field(sampling_mask, "offsets")
        logprobs = field(sampling_mask, "logprobs") if logprobs is None else logprobs
    if isinstance(token_ids, Mapping):
        raise MaskError(f"sampling_mask: needs token_ids, got fields {brief(sorted(map(str, token_ids)))}")
    if offsets is not None:
        return from_ids_offsets(token_ids, offsets, logprobs, limits=limits)
    return _checked(from_lists(token_ids, logprobs, limits=limits))


def from_sglang(meta_info: Mapping[str, Any], *, limits: Limits = DEFAULT_LIMITS) -> SamplingMask:
    """The mask in SGLang's `meta_info`, with logprobs when they were asked for the whole support.

    Reads output_token_sampling_mask, output_token_sampling_mask_length, output_token_sampling_logprobs (floats for
    sampling_logprobs_mode "selected", rows for "support") and output_token_sampling_mask_logprobs.
    Refuses a mask from bounded mode with truncated rows (the logprobs are over ids that are not there), empty rows
    (SGLang lists the ids of a whole vocabulary too), and one part of an incremental stream, whose parts have to be
    joined first.
    """
    rows = meta_info.get("output_token_sampling_mask")
    if rows is None:
        raise MaskError("output_token_sampling_mask: absent from meta_info; send return_sampling_mask=true")
    truncated = meta_info.get("output_token_sampling_mask_truncated") or []
    if not isinstance(truncated, Sequence) or (cut := [t for t, flag in enumerate(truncated) if flag]):
        where = f"{len(cut)} rows, the first at position {cut[0]}" if isinstance(truncated, Sequence) else "rows"
        raise MaskError(
            f"output_token_sampling_mask_truncated: {where}; a cut support cannot be replayed: use "
            "sampling_mask_mode='exact' or raise --sampling-mask-max-tokens"
        )
    length = meta_info.get("output_token_sampling_mask_length")
    if length is not None and isinstance(rows, Sequence) and (type(length) is not int or length != len(rows)):
        raise MaskError(
            f"output_token_sampling_mask_length: {brief(length)}, but there are {len(rows)} rows; "
            "join the parts of an incremental stream before reading the mask"
        )
    logprobs = meta_info.get("output_token_sampling_mask_logprobs")
    drawn = meta_info.get("output_token_sampling_logprobs")
    if logprobs is None and isinstance(drawn, Sequence) and drawn and isinstance(drawn[0], Sequence):
        logprobs = drawn
    mask = _checked(from_lists(rows, logprobs, limits=limits, name="output_token_sampling_mask"))
    if (empty := np.flatnonzero(mask.counts == 0)).size:
        raise MaskError(
            f"output_token_sampling_mask: row {empty[0]} is empty ({empty.size} such); SGLang lists all ids"
        )
    return mask


def from_verifiers(mask: object, *, sampled: ArrayLike | None = None, limits: Limits = DEFAULT_LIMITS) -> SamplingMask:
    """verifiers' or prime-rl's SamplingMask: an object or mapping with `ids`, `counts` and maybe `logprobs`.

    Takes the node form (one row a sampled token), the branch form (one row a token of the branch: give `sampled`,
    the branch's flags), the msgpack form whose arrays are `{"__nd__", dtype, shape, data}`, and prime-rl's bytes.
    """
    ids, counts, logprobs = (field(mask, name) for name in ("ids", "counts", "logprobs"))
    return from_ids_counts(ids, counts, logprobs, sampled=sampled, limits=limits)


def from_slime(sample: object, *, limits: Limits = DEFAULT_LIMITS) -> SamplingMask:
    """The mask of a slime Sample (rollout_top_p_token_ids, rollout_top_p_token_offsets), object or mapping.

    Reads the meta_info form too (top_p_token_ids, top_p_token_offsets, base64 of int32).
    """
    for prefix in ("rollout_top_p", "top_p", "top_p_kept"):
        ids, offsets = field(sample, f"{prefix}_token_ids"), field(sample, f"{prefix}_token_offsets")
        if ids is not None or offsets is not None:
            _both_or_neither(f"{prefix}_token_ids", ids, f"{prefix}_token_offsets", offsets)
            return from_ids_offsets(ids, offsets, limits=limits)
    raise MaskError("rollout_top_p_token_ids, rollout_top_p_token_offsets: absent; this sample carries no mask")


def to_slime(mask: SamplingMask) -> dict[str, NDArray[np.int32]]:
    """`rollout_top_p_token_ids` [N] and `rollout_top_p_token_offsets` [T+1], int32, as in a slime Sample."""
    return {"rollout_top_p_token_ids": mask.ids, "rollout_top_p_token_offsets": mask.offsets.astype(np.int32)}


def from_skyrl(
    sample_support: object,
    logprobs: object = None,
    *,
    loss_mask: ArrayLike | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> SamplingMask:
    """SkyRL's `rollout_sample_support`: [T, top_k] int32, each row's ids followed by -1 padding.

    Takes the array and the wire envelope `{data: base64, shape, dtype}`. logprobs: [T, top_k] float32 in the same
    layout, normalised over the support. loss_mask: [T] flags; the mask has the rows of the flagged tokens, by default
    of all. A row of nothing but padding says that no support was captured: it is refused inside the loss.
    """
    rows = read_array("rollout_sample_support", sample_support, INT32, limits, ndim=2)
    kept = rows != SKYRL_PADDING
    if (inner := np.flatnonzero((~kept[:, :-1] & kept[:, 1:]).any(1))).size:
        raise MaskError(f"rollout_sample_support: padding must come last in a row; it does not in row {inner[0]}")
    limits.check(num_rows=len(rows), num_ids=int(kept.sum()))
    values = None
    if logprobs is not None:
        values = read_array("rollout_sample_support_logprobs", logprobs, FLOAT32, limits, ndim=2)
        if values.shape != rows.shape:
            raise MaskError(
                f"rollout_sample_support_logprobs: shape {list(values.shape)} for ids of shape {list(rows.shape)}"
            )
        values = values[kept]
    mask = _mask(rows[kept], np.concatenate([[0], np.cumsum(kept.sum(1))]), values, limits)
    return _captured(mask, loss_mask)


def from_skyrl_packed(
    values: object,
    cu_seqlens: object,
    row_offsets: object = None,
    *,
    loss_mask: ArrayLike | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> list[SamplingMask]:
    """SkyRL's packed trainer fields, one mask a trajectory.

    PackedTensor: values [sum T, top_k] padded with -1, cu_seqlens [B+1] in rows. PackedRaggedTensor: values [N],
    row_offsets [sum T + 1], cu_seqlens [B+1] in rows. loss_mask: [sum T] flags, as in `from_skyrl`.
    """
    if row_offsets is None:
        num_rows = len(read_array("values", values, INT32, limits, ndim=2))
        whole = from_skyrl(values, loss_mask=loss_mask, limits=limits)
    else:
        whole = from_ids_offsets(values, row_offsets, limits=limits)
        num_rows = len(whole)
        whole = _captured(whole, loss_mask)
    bounds = _bounds("cu_seqlens", cu_seqlens, num_rows, "rows", limits)
    if loss_mask is not None:  # rows before each bound that are in the loss
        bounds = np.concatenate([[0], np.cumsum(read_flags("loss_mask", loss_mask, num_rows))])[bounds]
    return [whole[start:stop] for start, stop in pairwise(bounds.tolist())]


def to_skyrl(mask: SamplingMask, top_k: int | None = None) -> NDArray[np.int32]:
    """[T, top_k] int32, each row's ids followed by -1; top_k defaults to the widest row.

    Refuses wider rows, and rows of the whole vocabulary: padding alone would say that nothing was captured.
    """
    counts = mask.counts
    if (whole := np.flatnonzero(counts == 0)).size:
        raise MaskError(f"row {whole[0]}: the whole vocabulary has no form in SkyRL's layout; sample with a top_k")
    widest = int(counts.max(initial=0))
    width = widest if top_k is None else top_k
    if widest > width:
        raise MaskError(f"top_k={width}: the widest row holds {widest} ids; ties at the cut may exceed the sampler's")
    rows = np.full((len(mask), width), SKYRL_PADDING, np.int32)
    rows[np.arange(width) < counts[:, None]] = mask.ids
    return rows


def _mask(ids: NDArray[Any], offsets: NDArray[np.int64], logprobs: object, limits: Limits) -> SamplingMask:
    """The mask of CSR arrays whose rows may come in any order."""
    rows = np.repeat(np.arange(offsets.size - 1), np.diff(offsets))
    order = np.lexsort((ids, rows))
    if logprobs is None:
        return SamplingMask(ids[order], offsets)
    values = read_array("logprobs", logprobs, FLOAT32, limits)
    if values.size != ids.size:
        raise MaskError(f"logprobs: {values.size} values for {ids.size} ids; each id has its log-probability")
    return _checked(SamplingMask(ids[order], offsets, values[order]))


def _checked(mask: SamplingMask) -> SamplingMask:
    """Refuses logprobs that are not those of a distribution over each row."""
    if mask.logprobs is None:
        return mask
    with np.errstate(over="ignore"):
        weights = np.exp(mask.logprobs.astype(np.float64))
    rows = np.repeat(np.arange(len(mask)), mask.counts)
    mass = np.bincount(rows, weights, minlength=len(mask))
    off = np.flatnonzero((mask.counts > 0) & ~(np.abs(mass - 1) <= _MASS_TOLERANCE))
    if off.size:
        raise MaskError(
            f"logprobs: the probabilities of row {off[0]} add up to {mass[off[0]]:.4g} ({off.size} such rows); "
            "they must be over the support, renormalised, and add up to 1"
        )
    return mask


def _captured(mask: SamplingMask, loss_mask: ArrayLike | None) -> SamplingMask:
    """The rows inside the loss, each of which must hold ids."""
    kept = np.ones(len(mask), np.bool_) if loss_mask is None else read_flags("loss_mask", loss_mask, len(mask))
    if (lost := np.flatnonzero(kept & (mask.counts == 0))).size:
        raise MaskError(
            f"rollout_sample_support: row {lost[0]} is nothing but padding ({lost.size} such rows in the loss): no "
            "support was captured there; leave these tokens out of the loss (loss_mask), or capture them"
        )
    return mask if kept.all() else mask.take(np.flatnonzero(kept))


def _bounds(name: str, values: object, total: int, of: str, limits: Limits) -> NDArray[np.int64]:
    """Offsets [rows + 1] that divide `total` things."""
    bounds = read_array(name, values, INT32, limits)
    if not bounds.size or bounds[0] != 0 or bounds[-1] != total or (bounds[1:] < bounds[:-1]).any():
        given = brief(bounds[:20].tolist())
        raise MaskError(f"{name}: must start at 0, not decrease and end at the number of {of}, {total}; got {given}")
    limits.check(num_rows=bounds.size - 1, num_ids=0)
    return bounds


def _both_or_neither(first: str, a: object, second: str, b: object) -> None:
    if a is None or b is None:
        raise MaskError(f"{first if a is None else second}: absent; {first} and {second} belong together")
