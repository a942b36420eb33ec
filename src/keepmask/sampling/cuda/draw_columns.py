"""From the records of a batch to the columns of a `DrawTable`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepmask.sampling.row_records import Ints, Records
from keepmask.sampling.spec import SamplerSpec

__all__ = ["draw_columns"]


def draw_columns(records: Records, spec: SamplerSpec, items: Ints, source: Ints) -> dict[str, NDArray[Any]]:
    """[M] arrays by column, for rows `items` [M] of the batch, which read rows `source` [M] of the logits."""
    chosen = records[items]
    columns = {name: chosen[name] for name in records.dtype.names or ()}
    entries = (chosen["num_logprobs"] >= 0) & spec.logprobs_mode.startswith("processed")
    whole_with_logprobs = (chosen["whole"] != 0) & (entries | (chosen["returns_mask_logprobs"] != 0))
    return columns | {
        "source": source,
        # Without filters the support is all there is, and so is the normaliser of its log-probs.
        "weighs": (chosen["weighs"] != 0) | whole_with_logprobs,
        "mask_slot": _numbered(chosen["returns_mask"] != 0),
        "logprobs_slot": _numbered(chosen["returns_mask_logprobs"] != 0),
        "num_top": chosen["num_logprobs"],
    }


def _numbered(chosen: NDArray[np.bool_]) -> Ints:
    """0, 1, 2 ... where chosen, -1 elsewhere."""
    return np.where(chosen, chosen.cumsum() - 1, -1)
