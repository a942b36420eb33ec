"""`Group`: rows of a batch whose logits lie in one tensor."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keepmask.sampling.records import Ints, Records

__all__ = ["Group"]

SECOND_ORDER = 1.03
MARGINS = {
    torch.float32: (0.0, 0.0),
    torch.bfloat16: (2 * 2.0**-8 * SECOND_ORDER, 2.0**-12),
    torch.float16: (2 * 2.0**-11 * SECOND_ORDER, 2.0**-12),
}
"""(rho, alpha): a stored logit r lies within rho * abs(r) + alpha of the exact one. Rounding to nearest errs by 2**-8
(bfloat16) or 2**-11 (float16) of the value. rho allows two roundings, of the product and of what follows it, such as a
softcap; alpha, the order of a float32 accumulation and the subnormal numbers of float16."""


class Group(NamedTuple):
    """M rows of a batch that are read from one tensor of R >= M rows."""

    items: Ints
    """[M], their rows in the batch."""
    records: Records
    """[M] of `RECORD`; source is the row in `logits`."""
    logits: Tensor
    """[R, V], before temperature: float32, or rounded to bfloat16 or float16."""
    x: NDArray[Any]
    """[R, V], `logits` as the kernels read them: float32, or the bits of bfloat16."""
    margin: tuple[float, float]
    """Of `MARGINS`."""
    bans: bool
    """Some logits may be -inf because their ids are banned."""

    @classmethod
    def of(cls, items: Ints, records: Records, logits: Tensor, *, bans: bool = False) -> Group:
        """Rows `items` of the batch, which read the rows of logits that their records name."""
        if logits.dtype == torch.bfloat16:
            x = logits.contiguous().view(torch.int16).numpy().view(np.uint16)
        else:
            x = logits.float().contiguous().numpy()
        return cls(items, records, logits, x, MARGINS[logits.dtype], bans)

    @property
    def exact(self) -> bool:
        """Whether the logits are the exact ones."""
        return self.margin[0] == 0

    def take(self, which: NDArray[np.bool_]) -> Group:
        """Some of the rows. which: [M]."""
        return self if which.all() else self._replace(items=self.items[which], records=self.records[which])

    def one(self, m: int) -> Group:
        """One of the rows."""
        return self._replace(items=self.items[m : m + 1], records=self.records[m : m + 1])

    def rows(self) -> Tensor:
        """[M, V], a copy of the rows as they are."""
        return self.logits[torch.from_numpy(self.records["source"].copy())]

    def stored(self, token_ids: Ints) -> NDArray[np.float32]:
        """[M], the logit of one id in each row, as it is."""
        at = torch.from_numpy(self.records["source"].copy()), torch.from_numpy(token_ids)
        return self.logits[at].float().numpy()
