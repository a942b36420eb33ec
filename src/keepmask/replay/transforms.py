"""`TokenTransforms`: what the sampler did to the logits besides dropping ids, replayed at the support."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import TypeVar

import torch
from torch import Tensor

from keepmask.errors import MaskError
from keepmask.head.form import PairTransforms
from keepmask.replay.history import LogitBias, TokenHistory
from keepmask.replay.support import listed_rows
from keepmask.replay.turns import GREEDY_TEMPERATURE, NEUTRAL_PARAMS

__all__ = ["LogitBias", "PairTransforms", "TokenHistory", "TokenTransforms"]

Table = TypeVar("Table", LogitBias, TokenHistory)

_NEUTRAL = NEUTRAL_PARAMS
_POSITIVE = {"temperature": GREEDY_TEMPERATURE, "repetition_penalty": 0.0}  # and the least legal value of each


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenTransforms:
    """The parameters that changed the logits of each of T tokens before ids were dropped; None where none did.

    Bans, top-k, top-p and the like are not here: they only decide which ids are in the support. The order is vLLM's:
    logit bias, repetition penalty, frequency and presence penalties, temperature (`PairTransforms.apply`).
    """

    num_tokens: int
    """T."""
    temperature: Tensor | None = None
    """[T] float32. A greedy token (below 1e-5) has one id in its support, where no temperature matters."""
    repetition_penalty: Tensor | None = None
    """[T] float32, > 0. Needs `history`, as the two below."""
    frequency_penalty: Tensor | None = None
    """[T] float32."""
    presence_penalty: Tensor | None = None
    """[T] float32."""
    logit_bias: LogitBias | None = None
    history: TokenHistory | None = None

    def __post_init__(self) -> None:
        if self.history is None and self._penalised:
            raise MaskError("penalties count the ids before each token: give their `history` as well")
        lengths = {name: tensor.numel() for name in _NEUTRAL if (tensor := getattr(self, name)) is not None}
        if self.history is not None:
            lengths["history.lengths"] = self.history.lengths.numel()
        if self.logit_bias is not None:
            lengths["logit_bias.requests"] = self.logit_bias.requests.numel()
        wrong = [f"{name} has {length}" for name, length in lengths.items() if length != self.num_tokens]
        if wrong:
            raise MaskError(f"transforms need one value for each of the {self.num_tokens} tokens; {', '.join(wrong)}")

    def check(self, rows: Tensor) -> None:
        """Raise MaskError, naming the rows, where the logits of `rows`, of several ids each, cannot be transformed.

        That is: a greedy or undefined temperature, a repetition penalty that is not positive, or another value that is
        not finite. rows: [R] int64.
        """
        for name in _NEUTRAL:
            values: Tensor | None = getattr(self, name)
            if values is None:
                continue
            chosen = values[rows]
            bad = ~chosen.isfinite()
            if name in _POSITIVE:
                bad |= ~((chosen > 0) & (chosen >= _POSITIVE[name]))
            if bool(bad.any()):
                raise MaskError(
                    f"{listed_rows(rows[bad])}: {name} {chosen[bad][0].item():g}: must be "
                    + ("positive" if name in _POSITIVE else "finite")
                    + (", and below 1e-5 a draw is greedy and its row holds one id" if name == "temperature" else "")
                )
        if self.logit_bias is not None and bool((~(self.logit_bias.values < torch.inf)).any()):
            raise MaskError("logit_bias: must hold numbers below infinity; -inf takes an id away")

    def at(self, index: Tensor, ids: Tensor) -> PairTransforms:
        """The transforms of the pairs (token index[n], id ids[n]); [N] each. No [T, V] table is made."""
        bias = None if self.logit_bias is None else self.logit_bias.at(index, ids)
        counts = None
        if self.history is not None and self._penalised:
            counts = self.history.counts(index, ids)
        return self._combine(bias, counts, lambda values: values[index])

    def dense(self, ids: range) -> PairTransforms:
        """The transforms of these ids in every row, [T, len(ids)] each: for the few rows that hold all of them."""
        bias = None if self.logit_bias is None else self.logit_bias.dense(ids)
        counts = None
        if self.history is not None and self._penalised:
            counts = self.history.dense_counts(ids)
        return self._combine(bias, counts, lambda values: values[:, None])

    def select(self, rows: Tensor) -> TokenTransforms:
        """The transforms of these tokens, in this order. rows: [R] int64 row numbers, or [T] bool."""
        rows = rows.nonzero()[:, 0] if rows.dtype == torch.bool else rows
        return TokenTransforms(
            num_tokens=rows.numel(),
            **{name: None if (tensor := getattr(self, name)) is None else tensor[rows] for name in _NEUTRAL},
            logit_bias=None if self.logit_bias is None else self.logit_bias.select(rows),
            history=None if self.history is None else self.history.select(rows),
        )

    def to(self, device: torch.device | str) -> TokenTransforms:
        """The same transforms on `device`."""
        moved = {
            name: None if (part := getattr(self, name)) is None else part.to(device)
            for name in (*_NEUTRAL, "logit_bias", "history")
        }
        return TokenTransforms(num_tokens=self.num_tokens, **moved)

    @classmethod
    def cat(cls, transforms: Iterable[TokenTransforms]) -> TokenTransforms:
        """The tokens of all transforms, one after the other; all on one device.

        Where only some have a parameter, the tokens of the others get the value that changes nothing.
        """
        parts = list(transforms)
        device = next((part._device for part in parts if part._device is not None), torch.device("cpu"))
        return cls(
            num_tokens=sum(part.num_tokens for part in parts),
            **{name: _cat_values(parts, name, device) for name in _NEUTRAL},
            logit_bias=_cat_tables(LogitBias, parts, [part.logit_bias for part in parts], device),
            history=_cat_tables(TokenHistory, parts, [part.history for part in parts], device),
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor that these transforms are made of."""
        holders = [holder for holder in (self, self.logit_bias, self.history) if holder is not None]
        values = [getattr(holder, field.name) for holder in holders for field in fields(holder)]
        return tuple(value for value in values if isinstance(value, Tensor))

    @property
    def _penalised(self) -> bool:
        return any(p is not None for p in (self.repetition_penalty, self.frequency_penalty, self.presence_penalty))

    @property
    def _device(self) -> torch.device | None:
        values = [getattr(self, name) for name in _NEUTRAL]
        values += [self.logit_bias and self.logit_bias.ids, self.history and self.history.ids]
        return next((value.device for value in values if value is not None), None)

    def _combine(
        self, bias: Tensor | None, counts: tuple[Tensor, Tensor] | None, spread: Callable[[Tensor], Tensor]
    ) -> PairTransforms:
        """spread: a per-token value to the shape of the counts."""
        repetition, subtract = None, None
        if counts is not None:
            anywhere, output = counts
            if self.repetition_penalty is not None:
                repetition = torch.where(anywhere > 0, spread(self.repetition_penalty), 1.0)
            if self.frequency_penalty is not None:
                subtract = spread(self.frequency_penalty) * output
            if self.presence_penalty is not None:
                present = torch.where(output > 0, spread(self.presence_penalty), 0.0)
                subtract = present if subtract is None else subtract + present
        temperature = None if self.temperature is None else spread(self.temperature)
        return PairTransforms(bias=bias, repetition=repetition, subtract=subtract, temperature=temperature)


def _cat_values(parts: list[TokenTransforms], name: str, device: torch.device) -> Tensor | None:
    values: list[Tensor | None] = [getattr(part, name) for part in parts]
    given = next((value for value in values if value is not None), None)
    if given is None:
        return None
    return torch.cat(
        [
            torch.full((part.num_tokens,), _NEUTRAL[name], dtype=given.dtype, device=device) if value is None else value
            for part, value in zip(parts, values, strict=True)
        ]
    )


def _cat_tables(
    kind: type[Table], parts: list[TokenTransforms], tables: list[Table | None], device: torch.device
) -> Table | None:
    if all(table is None for table in tables):
        return None
    return kind.cat(
        [
            kind.empty(part.num_tokens, device) if table is None else table
            for part, table in zip(parts, tables, strict=True)
        ]
    )
