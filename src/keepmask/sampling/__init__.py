"""From logits to drawn tokens and their supports. Read `processors.STEPS`, `semantics`, `definition`, `pipeline`."""

from keepmask.head.sampled_logits import DenseHead, Head
from keepmask.sampling.drawn import PendingMask, Supports
from keepmask.sampling.pipeline import SampledBatch, Sampler
from keepmask.sampling.row import SamplingRow
from keepmask.sampling.spec import LogitsProcessor, ProcessorContext, SamplerSpec
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
    "Supports",
    "TokenLogprobs",
    "prompt_logprobs",
]
