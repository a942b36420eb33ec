"""`ReplayGRPOTrainer`: TRL's GRPO, scoring every policy on the supports the rollouts were drawn from."""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

import numpy as np
import torch
import trl
from packaging.version import Version
from torch import Tensor, nn
from transformers import ProcessorMixin
from trl import GRPOConfig, GRPOTrainer

from keepmask.backends.base import Rollouts
from keepmask.engine.policy_weights import policy_weights
from keepmask.errors import BackendError, ConfigError
from keepmask.integrations.replay_meter import ReplayMeter
from keepmask.integrations.rollout_backends import rollouts_from
from keepmask.llm import LLM
from keepmask.outputs import Rollout
from keepmask.params import SamplingParams
from keepmask.replay import ratios
from keepmask.replay.lm_head import add_lm_head
from keepmask.replay.mask_store import MaskStore

__all__ = ["ReplayGRPOConfig", "ReplayGRPOTrainer"]

_FIRST, _AFTER = Version("1.15"), Version("1.17")
"""Versions of TRL whose `rollout_func` and fused LM head are the ones used here: from the first to before the other."""

Correction = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
_CORRECTIONS = {
    "token_truncate": ratios.tis,
    "token_mask": ratios.mis,
    "sequence_truncate": ratios.sequence_tis,
    "sequence_mask": ratios.sequence_mis,
}


@dataclass
class ReplayGRPOConfig(GRPOConfig):  # type: ignore[misc]
    """`GRPOConfig` with where rollouts come from. Sampling parameters are TRL's own fields, and only these."""

    rollouts: str = field(default="embedded", metadata={"help": "'embedded', or the URL of a keepmask server."})
    rollout_options: dict[str, Any] = field(
        default_factory=dict,
        metadata={"help": "Options of the embedded engine (EngineConfig), or of the connection to the server."},
    )
    replay: bool = field(
        default=True,
        metadata={"help": "False scores on the whole vocabulary, as TRL does: the control of an experiment."},
    )
    importance_correction: str = field(
        default="none",
        metadata={
            "help": "Multiply advantages by trainer/engine ratios: token_truncate, token_mask, sequence_truncate or "
            "sequence_mask.",
            "choices": ["none", *_CORRECTIONS],
        },
    )
    importance_cap: float = field(default=2.0, metadata={"help": "The largest ratio that is not cut or masked."})
    mass_samples: int = field(
        default=16,
        metadata={"help": "Tokens of each micro-batch whose kept mass is measured over the whole vocabulary."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.importance_correction != "none" and self.importance_correction not in _CORRECTIONS:
            raise ConfigError(
                f"importance_correction={self.importance_correction!r}: must be none, {', '.join(_CORRECTIONS)}"
            )
        if self.importance_correction != "none" and self.loss_type == "vespo":
            raise ConfigError(
                f"importance_correction={self.importance_correction!r}: vespo takes one advantage a sequence, so its "
                "tokens have no weights of their own; set it to none, or take another loss_type"
            )
        if self.importance_cap <= 0 or self.mass_samples < 0:
            raise ConfigError(
                f"importance_cap={self.importance_cap} must be positive, mass_samples={self.mass_samples} not negative"
            )


class ReplayGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """`GRPOTrainer` whose rollouts carry masks, and whose old, current and reference log-probabilities are on them.

    Takes what `GRPOTrainer` takes, and `backend`: an object with the methods of `Rollouts` in place of
    `args.rollouts`. A `rollout_func` of the caller's own, for dialogues with tools, draws with `draw` and returns its
    rollouts under the key "rollouts" beside TRL's: an item a completion, which for several turns is a list of rollouts
    each continuing the one before, and under "env_mask" 0 for tokens that nobody drew.

    Raises ConfigError naming what would not be scored as it was drawn: another version of TRL, TRL's own generation
    back-ends and tool loop, prompt learning, adapters on the LM head that are not scored, vision-language models.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: ReplayGRPOConfig | None = None,
        *,
        backend: Rollouts | None = None,
        rollout_func: Callable[[list[Any], ReplayGRPOTrainer], dict[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        _check_version()
        args = ReplayGRPOConfig("replay-grpo") if args is None else args
        _check_options(args, options)
        _check_adapters(model, options.get("peft_config"))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="You are using 'rollout_func'")
            super().__init__(model, reward_funcs, args, rollout_func=self._roll_out, **options)
        if self._dist.is_zero3 or self._dist.fsdp_version == 1:
            raise ConfigError("DeepSpeed ZeRO-3 and FSDP 1 are not supported: their weights do not reach the engine")
        self._own_rollout_func = rollout_func
        policy = self.accelerator.unwrap_model(self.model)
        _check_text_only(policy, self.processing_class)
        self.sampling_params = _sampling_params(args, self.eos_token_ids)
        self.store = MaskStore(int(policy.get_output_embeddings().weight.shape[0]))
        self.backend = rollouts_from(args.rollouts if backend is None else backend, policy, args.rollout_options)
        self.meter = ReplayMeter()
        self.histograms: dict[str, list[float]] = {}
        self.phase_seconds: dict[str, float] = {}
        self._synced_step: int | None = None
        self.num_drawn_tokens = 0
        self._num_drawn = 0
        self._scored: Any = None
        if args.replay:
            entropy: Literal["value", "grad"] = "grad" if self._entropy_bonus_enabled else "value"
            add_lm_head(policy, self.store, entropy=entropy, mass_samples=args.mass_samples)
            if self.ref_model is not None:
                add_lm_head(self.accelerator.unwrap_model(self.ref_model), self.store)
        base = policy.get_base_model() if hasattr(policy, "get_base_model") else policy
        base.register_forward_pre_hook(self._before_scoring, with_kwargs=True)
        base.register_forward_hook(self._after_scoring, with_kwargs=True)

    def draw(
        self, prompts: Sequence[Sequence[int]], counts: Sequence[int] | None = None, **changes: Any
    ) -> list[list[Rollout]]:
        """Completions of these token ids by the current policy, `counts` of each (one by default).

        changes: sampling parameters that differ from those of `args`. A draw depends on `args.seed`, the training step,
        the process and how many were drawn before in this step, so that a resumed run draws what the first would have.
        """
        self._sync()
        started = time.perf_counter()
        params = [
            self.sampling_params.replace(**{"n": count, "seed": self._next_seed()} | changes)
            for count in (counts or [1] * len(prompts))
        ]
        drawn = self.backend.rollouts(prompts, params)
        self._spent("rollout", started)
        self.num_drawn_tokens += sum(rollout.token_ids.size for each in drawn for rollout in each)
        failed = [rollout for each in drawn for rollout in each if rollout.finish_reason in ("error", "abort")]
        if failed:
            raise BackendError(f"{len(failed)} rollouts ended with an error, the first: {failed[0].stop_reason}")
        return drawn

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """TRL's loss, with advantages multiplied by the importance weights where a correction is on."""
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        if self.args.importance_correction != "none":
            inputs = {**inputs, "advantages": self._weighted_advantages(model, inputs, mask)}
        loss: Tensor = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        scored, self._scored = self._scored, None
        width = mask.shape[1]
        logprobs = scored.log_probs[:, -width:].detach()
        mass = getattr(scored, "kept_mass", None)
        mass = torch.full_like(logprobs, torch.nan) if mass is None else mass[:, -width:]
        if self.model.training:
            self.meter.add_tokens(
                logprobs, inputs["sampling_per_token_logps"], mass, mask, fresh=self._weights_are_those_that_drew()
            )
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's metrics, and those of `ReplayMeter` under replay/; its histograms are in `histograms`."""
        if self.model.training:
            numbers = self.meter.numbers(self.accelerator)
            self.histograms = {name: value for name, value in numbers.items() if isinstance(value, list)}
            logs.update({f"replay/{name}": value for name, value in numbers.items() if name not in self.histograms})
            logs.update({f"seconds/{name}": value for name, value in self.phase_seconds.items()})
            self.phase_seconds = {}
        super().log(logs, start_time)

    def _roll_out(self, prompts: list[Any], _trainer: Any) -> dict[str, Any]:
        """TRL's `rollout_func`."""
        self._num_drawn = 0
        if self.model.training:  # in an evaluation, the completions of the last generation are still to be trained on
            self.store.clear()
        result = (self._own_rollout_func or _single_turn)(prompts, self)
        if "rollouts" not in result:
            raise ConfigError("rollout_func: must return its rollouts, an item a completion, under the key 'rollouts'")
        rollouts = result.pop("rollouts")
        if self.args.replay:
            self.store.add(rollouts)
        if self.model.training:
            turns = [turn for item in rollouts for turn in (item if isinstance(item, Sequence) else [item])]
            self._measure_supports(turns)
        return result

    def _measure_supports(self, turns: list[Rollout]) -> None:
        counts = [turn.sampling_mask.counts for turn in turns if turn.sampling_mask is not None]
        if counts:
            sizes = np.concatenate(counts)
            self.meter.add_supports(torch.from_numpy(np.where(sizes == 0, self.store.vocab_size, sizes)))

    def _sync(self) -> None:
        """Give the engine the weights of this step."""
        if self._synced_step != self.state.global_step:
            started = time.perf_counter()
            model, version = self.accelerator.unwrap_model(self.model), str(self.state.global_step)
            if isinstance(self.backend, LLM):
                self.backend.sync(model, version=version)
            else:
                self.backend.update_weights(dict(policy_weights(model)), version=version)
            self._synced_step = self.state.global_step
            self._spent("sync", started)

    def _next_seed(self) -> int:
        name = f"{self.args.seed}:{self.state.global_step}:{self.accelerator.process_index}:{self._num_drawn}"
        name += "" if self.model.training else ":eval"
        self._num_drawn += 1
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1

    def _weights_are_those_that_drew(self) -> bool:
        """Whether no update has come between the draws and this micro-batch."""
        generate_every = self.args.steps_per_generation * self.num_iterations
        return bool(self._step % generate_every < self.current_gradient_accumulation_steps)

    def _weighted_advantages(self, model: nn.Module, inputs: dict[str, Any], mask: Tensor) -> Tensor:
        """[B, T]: each token's advantage times its importance weight."""
        drawn = inputs["sampling_per_token_logps"]
        old = inputs.get("old_per_token_logps")
        if old is None:  # TRL leaves it out where the policy has not moved since: it is the current one
            with torch.no_grad():
                old, _, _ = self._get_per_token_logps_and_entropies(
                    model,
                    torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
                    torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
                    mask.shape[1],
                )
        known = mask.bool() & ~drawn.isnan()
        correction = _CORRECTIONS[self.args.importance_correction]
        weights = correction(old, drawn, known, cap=self.args.importance_cap).weights
        raw = correction(old, drawn, known, cap=float("inf")).weights
        if self.model.training:
            self.meter.add_weights(raw, known, clipped=weights != raw)
        return inputs["advantages"][:, None] * torch.where(known, weights, 1.0)  # type: ignore[no-any-return]

    def _before_scoring(self, _module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("fused_lm_head"):
            self._scoring_started = time.perf_counter()

    def _after_scoring(self, _module: nn.Module, _args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if kwargs.get("fused_lm_head"):
            self._scored = output
            if not torch.is_grad_enabled():
                self._spent("scoring", self._scoring_started)

    def _spent(self, phase: str, started: float) -> None:
        self.phase_seconds[phase] = self.phase_seconds.get(phase, 0.0) + time.perf_counter() - started


def _single_turn(prompts: list[Any], trainer: ReplayGRPOTrainer) -> dict[str, Any]:
    """One completion for each prompt; equal ones next to each other are drawn together."""
    prompt_ids, _, _ = trainer._tokenize_prompts(prompts)
    groups = [(list(key), len(list(same))) for key, same in groupby(map(tuple, prompt_ids))]
    drawn = trainer.draw([prompt for prompt, _ in groups], [count for _, count in groups])
    rollouts = [rollout for each in drawn for rollout in each]
    return {
        "prompt_ids": [list(ids) for ids in prompt_ids],
        "completion_ids": [rollout.token_ids.tolist() for rollout in rollouts],
        "logprobs": [_logprobs(rollout) for rollout in rollouts],
        "rollouts": rollouts,
    }


def _logprobs(rollout: Rollout) -> list[float]:
    if rollout.logprobs is None:
        raise BackendError("rollouts: come without log-probabilities; the backend must answer logprobs=0")
    values: list[float] = rollout.logprobs.tolist()
    return values


def _sampling_params(args: ReplayGRPOConfig, eos_token_ids: Sequence[int]) -> SamplingParams:
    """What a rollout is drawn with. `generation_kwargs` may name any other field of `SamplingParams`."""
    fields = {
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p or 0.0,
        "repetition_penalty": args.repetition_penalty,
        "max_tokens": args.max_completion_length,
        "stop_token_ids": list(eos_token_ids),
    }
    fixed = {"logprobs": 0, "return_sampling_mask": True, "detokenize": False}
    return SamplingParams(**fields | dict(args.generation_kwargs or {}) | fixed)


def _check_version() -> None:
    found = Version(trl.__version__)
    if not _FIRST <= found < _AFTER:
        raise ConfigError(
            f"trl {found}: the trainer relies on interfaces that TRL does not document, as they are from {_FIRST} to "
            f"before {_AFTER}; install one of these"
        )


def _check_options(args: Any, options: dict[str, Any]) -> None:
    if not isinstance(args, ReplayGRPOConfig):
        raise ConfigError(f"args: must be a ReplayGRPOConfig, got {type(args).__name__}")
    for name in ("use_vllm", "use_transformers_continuous_batching"):
        if getattr(args, name):
            raise ConfigError(f"{name}=True: its rollouts have no masks; set `rollouts` or give a `backend` instead")
    for name in ("tools", "environment_factory"):
        if options.get(name) is not None:
            raise ConfigError(
                f"{name}: TRL draws the turns after the first itself, without masks; write the dialogue as a "
                "rollout_func, which draws with trainer.draw and returns env_mask"
            )


def _check_adapters(model: Any, new: Any) -> None:
    configs = [config for config in (new, *getattr(model, "peft_config", {}).values()) if config]
    for config in configs:
        if config.is_prompt_learning:
            raise ConfigError(
                f"{type(config).__name__}: prompt learning puts vectors before the tokens, which the rollout engine "
                "cannot draw after; use an adapter such as LoRA"
            )


def _check_text_only(model: Any, processing_class: Any) -> None:
    if isinstance(processing_class, ProcessorMixin) or any(
        hasattr(model.config, name) for name in ("vision_config", "audio_config")
    ):
        raise ConfigError(f"{type(model).__name__}: multimodal models are not supported; the engine reads text only")
