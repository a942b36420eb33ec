"""`Sampler`: from the head's logits to drawn tokens, their supports and their log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from keepmask.errors import ConfigError, RequestError
from keepmask.head.sampled_logits import Head
from keepmask.params import SamplingParams
from keepmask.sampling.definition import draw_reference
from keepmask.sampling.drawn import Drawn, PendingMask
from keepmask.sampling.param_checks import check_params, check_token_ids
from keepmask.sampling.row import Grammar, SamplingRow
from keepmask.sampling.spec import SamplerSpec
from keepmask.sampling.token_logprobs import BatchLogprobs

__all__ = ["SampledBatch", "Sampler"]

if TYPE_CHECKING:
    from keepmask.sampling.cpu.fast_draw import FastDraw
    from keepmask.sampling.cuda.device_draw import DeviceDraw

Implementation = Literal["auto", "reference", "fast", "triton"]


@dataclass(frozen=True, slots=True)
class SampledBatch:
    """One token for each of B rows, on the host."""

    token_ids: NDArray[np.int64]
    """[B]; -1 where the row failed."""
    errors: dict[int, RequestError]
    """Why, by row index. The other rows are as if the failed ones had not been there."""
    logprobs: BatchLogprobs
    """Of rows whose params ask for them."""
    mask: PendingMask | None
    """Supports of rows that return them; None where no row does."""


class Sampler:
    """Draws one token a row, and keeps the support each was drawn from.

    The draw of a row depends on its logits, parameters, history, seed and completion index alone: not on the other
    rows, the implementation, or whether the mask is returned.

    impl: "reference" works on all of V by definition; "fast" selects candidates first; "auto" is "fast" where there is
    a fast form for the device. "triton" is the fast form of CUDA devices, which a CPU runs under Triton's interpreter.
    All draw the same tokens from the same supports.
    """

    def __init__(self, spec: SamplerSpec, *, impl: Implementation = "auto") -> None:
        if impl not in ("auto", "reference", "fast", "triton"):
            raise ConfigError(f"impl={impl!r}: must be 'auto', 'reference', 'fast' or 'triton'")
        self.spec = spec
        self.impl = impl
        self._fast = _fast_draw(spec, impl)
        self._has_triton = _has_triton(impl)
        self._on_device: DeviceDraw | None = None

    def check(self, params: SamplingParams) -> None:
        """Raise RequestError naming field, rule and remedy, if a request with these params cannot be served."""
        check_params(params, self.spec)

    def open_row(
        self,
        params: SamplingParams,
        *,
        prompt_token_ids: Sequence[int],
        seed: int,
        completion_index: int,
        bad_words_token_ids: Sequence[Sequence[int]] = (),
        grammar: Grammar | None = None,
    ) -> SamplingRow:
        """Begin a completion.

        bad_words_token_ids: the params' bad words as the engine's tokenizer spells them. grammar: where the completion
        begins in the form that the params ask for.

        Raises RequestError for ids outside the vocabulary.
        """
        check_token_ids("prompt_token_ids", prompt_token_ids, self.spec.vocab_size)
        for word in bad_words_token_ids:
            check_token_ids("bad_words", word, self.spec.vocab_size)
        return SamplingRow(
            params,
            self.spec,
            prompt_token_ids=prompt_token_ids,
            seed=seed,
            completion_index=completion_index,
            bad_words_token_ids=bad_words_token_ids,
            grammar=grammar,
        )

    @torch.inference_mode()
    def sample(self, head: Head, rows: Sequence[SamplingRow]) -> SampledBatch:
        """Draw the next token of each row. head: logits [B, V] of these rows. Appends nothing.

        On a CUDA device it waits for the draws; their supports are then on their way, in the batch's `mask`.
        A row that cannot be drawn from has its error in the result; nothing is raised for it.
        """
        assert head.logits.shape == (len(rows), self.spec.vocab_size)
        if not rows:
            return SampledBatch(np.zeros(0, np.int64), {}, BatchLogprobs.empty(0, 0), None)
        drawn = self._draw(head, rows)
        self._check_membership(drawn, rows)
        self._charge_masks(drawn, rows)
        failed = list(drawn.errors)
        drawn.token_ids[failed] = -1
        drawn.entries.counts[failed] = 0
        return SampledBatch(drawn.token_ids, drawn.errors, drawn.entries, self._capture(drawn, rows))

    def _draw(self, head: Head, rows: Sequence[SamplingRow]) -> Drawn:
        device = head.logits.device
        if self._fast is not None and device.type == "cpu":
            return self._fast(head, rows)
        if self._has_triton and (device.type == "cuda" or self.impl == "triton"):
            if self._on_device is None:
                from keepmask.sampling.cuda.device_draw import DeviceDraw

                self._on_device = DeviceDraw(self.spec)
            return self._on_device(head, rows)
        if self.impl == "fast":
            raise ConfigError(f"impl='fast': there is no fast sampler for device {device}; use impl='auto'")
        return draw_reference(head, rows, self.spec)

    def _check_membership(self, drawn: Drawn, rows: Sequence[SamplingRow]) -> None:
        """Fail rows whose support is empty or does not hold the drawn id."""
        for b in np.flatnonzero(drawn.token_ids < 0).tolist():
            message = (
                f"no token is left to draw at output position {rows[b].num_output_tokens}: the bans leave nothing of "
                "the vocabulary; relax allowed_token_ids, structured_outputs, bad_words, min_tokens or "
                "the logits processors"
            )
            drawn.errors.setdefault(b, RequestError(message))
        for b in drawn.outside().tolist():
            message = (
                f"token {drawn.token_ids[b]} drawn at output position {rows[b].num_output_tokens} is outside its "
                "support; this is a fault of the sampler, please report it"
            )
            drawn.errors.setdefault(b, RequestError(message))

    def _charge_masks(self, drawn: Drawn, rows: Sequence[SamplingRow]) -> None:
        """Hold each returned row against its request's byte budget."""
        for b, row in enumerate(rows):
            if not row.returns_mask:
                continue
            size = int(drawn.counts[b]) * (8 if row.returns_mask_logprobs else 4)
            row.mask_bytes_pending = size
            if row.mask_bytes + size > row.max_mask_bytes:
                error = RequestError(
                    f"sampling mask of {row.mask_bytes + size} bytes at output position {row.num_output_tokens}: over "
                    f"the {row.max_mask_bytes} bytes a completion of this request may use; truncate with top_k, top_p "
                    "or min_p, ask for fewer tokens, or raise max_mask_bytes_per_request",
                    param="return_sampling_mask",
                )
                drawn.errors.setdefault(b, error)

    def _capture(self, drawn: Drawn, rows: Sequence[SamplingRow]) -> PendingMask | None:
        captured = any(row.returns_mask and b not in drawn.errors for b, row in enumerate(rows))
        return drawn.pending_mask(rows) if captured else None


def _fast_draw(spec: SamplerSpec, impl: Implementation) -> FastDraw | None:
    if impl in ("reference", "triton"):
        return None
    if find_spec("numba") is None:
        if impl == "fast":
            raise ConfigError("impl='fast': needs numba; install keepmask[engine], or use impl='auto'")
        return None
    from keepmask.sampling.cpu.fast_draw import FastDraw

    return FastDraw(spec)


def _has_triton(impl: Implementation) -> bool:
    """Whether CUDA devices have their form. Triton itself is loaded when it is first used."""
    if impl == "reference":
        return False
    found = find_spec("triton") is not None
    if impl == "triton" and not found:
        raise ConfigError("impl='triton': needs Triton, which PyTorch's builds for CUDA bring; use impl='auto'")
    return found
