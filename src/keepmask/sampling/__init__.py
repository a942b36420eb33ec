"""From logits to drawn tokens and their supports. Read `processors.STEPS`, `semantics`, `pipeline`, `capture`."""

from keepmask.head.sampled_logits import DenseHead, Head
from keepmask.sampling.pending_mask import PendingMask
from keepmask.sampling.pipeline import SampledBatch, Sampler
from keepmask.sampling.processors import LogitsProcessor, ProcessorContext
from keepmask.sampling.row import SamplingRow
from keepmask.sampling.spec import SamplerSpec
from keepmask.sampling.token_logprobs import BatchLogprobs, TokenLogprobs, prompt_logprobs

__all__ = [
    "BatchLogprobs",
    "DenseHead",
    "Head",
    "LogitsProcessor",
    "PendingMask",
    "ProcessorContext",
    "SampledBatch",
    "Sampler",
    "SamplerSpec",
    "SamplingRow",
    "TokenLogprobs",
    "prompt_logprobs",
]
