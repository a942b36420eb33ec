"""Random scoring problems and their answers by definition: dense float64 rows, one at a time, under autograd."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from types import SimpleNamespace

import numpy as np
import torch

from keepmask.replay.history import LogitBias, TokenHistory
from keepmask.replay.logprobs import ScoreOptions, logprobs_from_hidden
from keepmask.replay.policy_head import Head
from keepmask.replay.support import Support
from keepmask.replay.transforms import TokenTransforms


@dataclass
class Token:
    """One drawn token: its support (None: the whole vocabulary), and everything that changed its logits."""

    support: list[int] | None
    target: int
    temperature: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)

    @property
    def params(self):
        return SimpleNamespace(**{name: getattr(self, name) for name in PARAMS}, logit_bias=self.logit_bias)

    def transform(self, logits):
        """[V] float64, differentiable: the semantics of the sampler, by counting."""
        before, counts = set(self.prompt) | set(self.output), Counter(self.output)
        ids = range(len(logits))
        bias = [self.logit_bias.get(i, 0.0) for i in ids]
        divisor = [self.repetition_penalty if i in before else 1.0 for i in ids]
        subtract = [self.frequency_penalty * counts[i] + self.presence_penalty * (counts[i] > 0) for i in ids]
        bias, divisor, subtract = (torch.tensor(x, dtype=torch.float64) for x in (bias, divisor, subtract))
        z = logits + bias
        z = torch.where(z > 0, z / divisor, z * divisor) - subtract
        return z / self.temperature


PARAMS = ("temperature", "repetition_penalty", "frequency_penalty", "presence_penalty")


def random_tokens(rng, *, num_tokens, vocab_size, empty=0.1, single=0.2, max_width=12, transforms=True):
    """Tokens of a few dialogues; later turns count earlier ones as prompt."""
    tokens, text, start = [], list(rng.integers(0, vocab_size, 5)), 5
    shared = {}
    for _ in range(num_tokens):
        if rng.random() < 0.15:  # a new request: the text so far becomes its prompt
            start = len(text)
            shared = {
                "temperature": float(rng.uniform(0.5, 2)),
                "repetition_penalty": float(rng.uniform(0.7, 1.6)),
                "frequency_penalty": float(rng.uniform(-1, 1)),
                "presence_penalty": float(rng.uniform(-1, 1)),
                "logit_bias": {int(i): float(rng.normal()) for i in rng.integers(0, vocab_size, 4)},
            }
        kind = rng.random()
        width = 1 if kind < single else int(rng.integers(2, max_width + 1))
        support = None if kind > 1 - empty else sorted(rng.choice(vocab_size, width, replace=False).tolist())
        target = int(rng.integers(vocab_size)) if support is None else int(rng.choice(support))
        extras = {**shared, "prompt": text[:start], "output": text[start:]} if transforms else {}
        tokens.append(Token(support, target, **extras))
        text.append(target)
    return tokens


def support_of(tokens, dtype=torch.int32):
    rows = [token.support or [] for token in tokens]
    return Support(torch.tensor([i for row in rows for i in row], dtype=dtype), offsets_of(rows))


def offsets_of(rows):
    return torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)


def targets_of(tokens):
    return torch.tensor([token.target for token in tokens], dtype=torch.int64)


def transforms_of(tokens):
    """Every token a sequence of its own."""
    history = [[*token.prompt, *token.output] for token in tokens]
    lengths = torch.tensor([len(ids) for ids in history], dtype=torch.int64)
    biases = [list(token.logit_bias.items()) for token in tokens]
    return TokenTransforms(
        num_tokens=len(tokens),
        **{name: torch.tensor([getattr(token, name) for token in tokens]) for name in PARAMS},
        logit_bias=LogitBias(
            ids=torch.tensor([i for bias in biases for i, _ in bias], dtype=torch.int64),
            values=torch.tensor([value for bias in biases for _, value in bias]),
            offsets=offsets_of(biases),
            requests=torch.arange(len(tokens)),
        ),
        history=TokenHistory(
            ids=torch.tensor([i for ids in history for i in ids], dtype=torch.int64),
            offsets=offsets_of(history),
            sequences=torch.arange(len(tokens)),
            lengths=lengths,
            starts=torch.tensor([len(token.prompt) for token in tokens], dtype=torch.int64),
        ),
    )


def head_logits(hidden, weight, bias=None, softcap=None, scale=1.0):
    """[T, V] float64."""
    logits = hidden.double() @ weight.double().T
    logits = scale * (logits if bias is None else logits + bias.double())
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


_OF_HEAD = ("bias", "softcap", "scale", "rounding", "adapters", "vocab_parallel")
_OF_OPTIONS = [field.name for field in fields(ScoreOptions)]


def score_rows(hidden, weight, targets, mask, **named):
    """`logprobs_from_hidden` with the fields of its head and its options by name."""
    head = Head(weight, **{name: named.pop(name) for name in _OF_HEAD if name in named})
    options = ScoreOptions(**{name: named.pop(name) for name in _OF_OPTIONS if name in named})
    return logprobs_from_hidden(hidden, head, targets, mask, options=options, **named)


def definition(logits, tokens, *, scored=None, ref_member_logprobs=None):
    """Scores out of [T, V] float64 logits, row by row; `scored` [T] bool says which rows count."""
    zero = logits.new_zeros(())
    logprobs, entropies, kls, members, normalizers, full = [], [], [], [], [], []
    place = 0
    for t, token in enumerate(tokens):
        ids = list(range(logits.shape[1])) if token.support is None else token.support
        pairs = slice(place, place + len(token.support or []))
        place = pairs.stop
        if scored is not None and not scored[t]:
            logprobs.append(zero)
            entropies.append(zero)
            kls.append(zero)
            members.append(logits.new_zeros(pairs.stop - pairs.start))
            normalizers.append(zero * torch.nan)
            full.append(zero * torch.nan)
            continue
        z = token.transform(logits[t])
        row = z[ids].log_softmax(0)
        logprobs.append(row[ids.index(token.target)])
        entropies.append(-(row.exp() * row).sum())
        members.append(row if token.support is not None else row[:0])
        normalizers.append(z[ids].logsumexp(0))
        full.append(z.logsumexp(0))
        if ref_member_logprobs is not None:
            kls.append((row.exp() * (row - ref_member_logprobs[pairs])).sum() if token.support else zero)
    return SimpleNamespace(
        logprobs=torch.stack(logprobs),
        entropy=torch.stack(entropies),
        kl=torch.stack(kls) if ref_member_logprobs is not None else None,
        member_logprobs=torch.cat(members),
        log_normalizer=torch.stack(normalizers),
        full_log_normalizer=torch.stack(full),
    )


ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def logit_error(size, magnitude, arithmetic=torch.float32):
    """How far a logit may be off that is a sum of `size` products and of this magnitude.

    Rounding errors of a sum add up as a random walk does (Higham and Mary 2019, "A new approach to probabilistic
    rounding error analysis"): sqrt(size) units of roundoff of its partial sums, of which two standard deviations.
    """
    return 2 * ROUNDOFF[arithmetic] * (size**0.5 + 2) * magnitude


def score_error(size, magnitude, arithmetic=torch.float32):
    """How far a log-probability, an entropy or a normaliser may be off: it is the difference of two logits, and an
    exponential and a logarithm of a few units each."""
    return 2 * logit_error(size, magnitude, arithmetic) + 8 * ROUNDOFF[arithmetic] * (1 + magnitude)


def gradient_error(size, magnitude, num_terms, stored=torch.float32, arithmetic=torch.float32):
    """How far the norm of a gradient may be off, relative to it: as its probabilities are, by the error of their
    logarithms; as a sum of so many terms is; and by one rounding to what it is stored in."""
    of_sum = ROUNDOFF[arithmetic] * (num_terms**0.5 + 4)
    return score_error(size, magnitude, arithmetic) + of_sum + (0 if stored == arithmetic else ROUNDOFF[stored])


class ParallelProblem:
    """What every rank scores, the same on each of them."""

    values = ("logprobs", "entropy", "member_logprobs", "log_normalizer", "full_log_normalizer")

    def __init__(self, seed, *, vocab_size, num_tokens=30, kl=False, **kinds):
        rng = np.random.default_rng(seed)
        tokens = random_tokens(rng, num_tokens=num_tokens, vocab_size=vocab_size, **kinds)
        generator = torch.Generator().manual_seed(seed)
        self.hidden = torch.randn(num_tokens, 16, generator=generator)
        self.weight = torch.randn(vocab_size, 16, generator=generator)
        self.bias = torch.randn(vocab_size, generator=generator)
        self.targets, self.support = targets_of(tokens), support_of(tokens)
        self.options = {"transforms": transforms_of(tokens), "entropy": "grad", "full_log_normalizer": True}
        self.weights = torch.randn(3, num_tokens, generator=generator)
        self.member_weights = torch.randn(self.support.num_pairs, generator=generator)
        if kl:
            rows = [torch.randn(n, generator=generator).log_softmax(0) for n in self.support.counts.tolist()]
            self.options["ref_member_logprobs"] = torch.cat(rows)
            self.values = (*self.values, "kl")

    def loss(self, scores):
        loss = (scores.logprobs * self.weights[0] + scores.entropy * self.weights[1]).sum()
        loss = loss + (scores.member_logprobs * self.member_weights).sum()
        return loss if scores.kl is None else loss + (scores.kl * self.weights[2]).sum()

    @classmethod
    def all(cls):
        return {
            "ragged": cls(0, vocab_size=61),
            "kl": cls(1, vocab_size=61, kl=True, empty=0.0),
            "tiny": cls(2, vocab_size=4, max_width=3, num_tokens=12),  # a third rank has no head rows at all
        }
