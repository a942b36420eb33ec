"""`ModelDrafter`: guesses by a smaller model of the same tokenizer, drawn with the noise of the engine's own draws.

The tokens most likely to be drawn by the engine are those that the smaller model would draw with the same noise, since
what the two distributions share, they then draw alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from keepmask.config import EngineConfig, SpeculativeConfig
from keepmask.engine.kvcache import BlockPool
from keepmask.engine.loading import load_tokenizer
from keepmask.engine.model_runner import ModelRunner
from keepmask.errors import ConfigError
from keepmask.params import SamplingParams
from keepmask.sampling import Sampler, SamplerSpec, SamplingRow

__all__ = ["ModelDrafter", "ModelRow"]

_FILTERS = ("temperature", "top_k", "top_p", "min_p", "sampling_semantics")
"""What of a request's parameters its guesses follow. Bans and penalties would need a history for each of them."""


@dataclass(slots=True, eq=False)
class ModelRow:
    """One completion in flight, as the smaller model sees it; a `forward_batch.Sequenced`.

    `token_ids` are the prompt, the tokens drawn, and, while it guesses, its guesses.
    """

    sampling: SamplingRow
    pool: BlockPool
    token_ids: list[int]
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    guesses: list[int] = field(default_factory=list)
    """Those of the last draft that may still turn out to be drawn, and whose keys and values are in the blocks."""

    def tokens(self, start: int, stop: int) -> list[int]:
        """Its tokens at positions [start, stop)."""
        return self.token_ids[start:stop]

    def append(self, token_id: int) -> None:
        """Account for a token that was drawn. Keys and values of guesses hold as far as the guesses do."""
        if self.guesses and self.guesses[0] == token_id:
            del self.guesses[0]
        else:
            self.guesses.clear()
            self.num_computed = min(self.num_computed, len(self.token_ids))
        self.token_ids.append(token_id)
        self.sampling.append(token_id)

    def close(self) -> None:
        """The completion has ended."""
        self.pool.release(self.blocks)
        self.blocks = []


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A `forward_batch.Chunk`: all that is not computed yet, and then a draw."""

    completion: ModelRow
    num_tokens: int
    draws: bool = True
    draft: Sequence[int] = ()

    @property
    def num_rows(self) -> int:
        return self.num_tokens


class ModelDrafter:
    """A `Drafter` by a model. Raises ConfigError where its vocabulary is not that of the engine's model."""

    def __init__(self, config: EngineConfig, wanted: SpeculativeConfig, vocab_size: int, tokenizer: Any) -> None:
        own = config.model_copy(
            update={
                "model": wanted.model,
                "tokenizer": None,
                "max_model_len": None,
                "kv_cache_memory_bytes": wanted.kv_cache_memory_bytes,
                "speculative_config": None,
            }
        )
        self._runner = ModelRunner(own)
        theirs = load_tokenizer(own)
        if self._runner.vocab_size != vocab_size or (
            tokenizer is not None and theirs is not None and tokenizer.get_vocab() != theirs.get_vocab()
        ):
            raise ConfigError(
                f"speculative_config.model={wanted.model!r}: its tokens, {self._runner.vocab_size} of them, are not "
                f"the {vocab_size} of the model it guesses for; take a smaller model of the same tokenizer"
            )
        self._sampler = Sampler(SamplerSpec(vocab_size=vocab_size, semantics=config.sampling_semantics))
        self._pool = BlockPool(self._runner.num_blocks, own.block_size)
        self._budget = config.max_num_batched_tokens
        self.step_s = self._measured()

    def expect(self, prompt_token_ids: Sequence[int]) -> None:
        """Nothing to prepare."""

    def release(self, prompt_token_ids: Sequence[int]) -> None:
        """Nothing to give up."""

    def open(
        self, prompt_token_ids: Sequence[int], *, params: SamplingParams, seed: int, completion_index: int
    ) -> ModelRow:
        """The row of a completion without tokens so far."""
        plain = SamplingParams(**{name: getattr(params, name) for name in _FILTERS}, return_sampling_mask=False)
        sampling = self._sampler.open_row(
            plain, prompt_token_ids=prompt_token_ids, seed=seed, completion_index=completion_index
        )
        return ModelRow(sampling, self._pool, list(prompt_token_ids))

    def propose(self, rows: Sequence[ModelRow], most: Sequence[int]) -> list[list[int]]:
        """What the model draws. Rows go without guesses where its cache, its context or the step have no room."""
        lengths = [len(row.token_ids) for row in rows]
        wanted = dict(zip(rows, most, strict=True))
        num_rows, active = 0, []
        for row, count in wanted.items():
            row.guesses.clear()
            row.num_computed = min(row.num_computed, len(row.token_ids) - 1)
            pending = len(row.token_ids) - row.num_computed
            if count and num_rows + pending <= self._budget and self._reserve(row, len(row.token_ids) + count - 1):
                num_rows += pending
                active.append(row)
        for number in range(max(most, default=0)):
            active = [row for row in active if wanted[row] > number]
            if active:
                self._draw(active)
        drafts = []
        for row, length in zip(rows, lengths, strict=True):
            draft = row.token_ids[length:]
            del row.token_ids[length:]
            row.guesses = draft[: max(0, row.num_computed - length)]
            row.sampling.num_output_tokens -= len(draft)  # what follows overwrites them
            drafts.append(draft)
        return drafts

    def _draw(self, rows: Sequence[ModelRow]) -> None:
        """One more guess in each of these rows."""
        runner = self._runner
        batch = runner.lay_out([_Chunk(row, len(row.token_ids) - row.num_computed) for row in rows])
        hidden = runner.forward(batch, [])
        drawing = [batch.chunks[at].completion for at in batch.rounds[0]]
        sampled = self._sampler.sample(runner.head(hidden[batch.draw_rows]), [row.sampling for row in drawing])
        for row, token_id in zip(drawing, sampled.token_ids.tolist(), strict=True):
            row.num_computed = len(row.token_ids)
            row.token_ids.append(max(0, token_id))  # -1 where it failed: a guess like any other
            row.sampling.append(max(0, token_id))

    def _reserve(self, row: ModelRow, num_tokens: int) -> bool:
        missing = self._pool.blocks_for(num_tokens) - len(row.blocks)
        if num_tokens > self._runner.max_model_len or missing > self._pool.num_free:
            return False
        if missing > 0:
            row.blocks += self._pool.take(missing, after=row.blocks[-1] if row.blocks else None)
        return True

    def _measured(self) -> float:
        """Seconds of a guess in one row, which hardly grow with the rows."""
        row = self.open([0], params=SamplingParams(), seed=0, completion_index=0)
        times = []
        for _ in range(4):
            start = perf_counter()
            self.propose([row], [4])
            times.append((perf_counter() - start) / 4)
        row.close()
        return min(times)
