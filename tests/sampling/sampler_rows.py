"""Heads and rows for the sampler's tests."""

import numpy as np
import torch

from keepmask.params import SamplingParams
from keepmask.sampling import DenseHead, SamplerSpec


class HalfHead:
    """A head that stores its logits in half precision and computes any of them exactly; counts exact rows."""

    def __init__(self, exact, dtype):
        self.exact = exact
        self.logits = exact.to(dtype)
        self.num_exact_rows = 0

    def rescore(self, rows, ids, offsets):
        return self.exact[rows.repeat_interleave(offsets.diff()), ids]

    def float32(self, rows):
        self.num_exact_rows += len(rows)
        return self.exact[rows].clone()


def head_of(logits, dtype=torch.float32):
    exact = torch.as_tensor(np.asarray(logits), dtype=torch.float32)
    return DenseHead(exact) if dtype == torch.float32 else HalfHead(exact, dtype)


def masks(vocab_size, **changes):
    """A spec that returns masks."""
    return SamplerSpec(vocab_size=vocab_size, logprobs_mode="processed_logprobs", return_sampling_mask=True, **changes)


def open_row(sampler, params=None, *, prompt=(0,), seed=0, completion_index=0, bad_words=(), output=(), **fields):
    row = sampler.open_row(
        params or SamplingParams(**fields),
        prompt_token_ids=list(prompt),
        seed=seed,
        completion_index=completion_index,
        bad_words_token_ids=bad_words,
    )
    for token_id in output:
        row.append(token_id)
    return row


def sample(sampler, logits, rows, dtype=torch.float32):
    return sampler.sample(head_of(logits, dtype), rows)


def support(batch, i=0):
    return batch.mask.wait().row(i)[0].tolist()


def draw(sampler, logits, params=None, **fields):
    """One row alone: its batch."""
    return sample(sampler, [logits], [open_row(sampler, params, **fields)])


__all__ = ["HalfHead", "draw", "head_of", "masks", "open_row", "sample", "support"]
