"""From logits to drawn tokens and their supports. Read `processors.STEPS`, `semantics`, `pipeline`, `capture`."""

from keepmask.sampling.capture import PendingMask
from keepmask.sampling.head import DenseHead, Head
from keepmask.sampling.logprobs import BatchLogprobs, TokenLogprobs, prompt_logprobs
from keepmask.sampling.pipeline import SampledBatch, Sampler
from keepmask.sampling.processors import LogitsProcessor, ProcessorContext
from keepmask.sampling.row import SamplingRow
from keepmask.sampling.spec import SamplerSpec

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
