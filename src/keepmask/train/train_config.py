"""`TrainConfig`: one training run. Attribute docstrings are the help texts of the command line."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from keepmask.errors import ConfigError

__all__ = ["TrainConfig"]


class TrainConfig(BaseModel):
    """A GRPO run on one task. Raises ConfigError naming the field, the rule and the remedy."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())

    model: str = "smollm2-135m"
    """Name of a packaged model, a checkpoint folder, or a Hugging Face hub id."""
    task: str = "add-1"
    """What to learn: a task's name, or reasoning-gym:DATASET."""
    steps: int = Field(20, ge=1)
    """Optimizer steps."""
    prompts_per_step: int = Field(8, ge=1)
    """Prompts of one generation."""
    num_generations: int = Field(8, ge=2)
    """Completions of each prompt."""
    updates_per_generation: int = Field(1, ge=1)
    """Optimizer steps into which the completions of one generation are split; all but the first are stale."""
    num_iterations: int = Field(1, ge=1)
    """Passes over the completions of one generation."""
    micro_batch_size: int | None = Field(None, ge=1)
    """Completions in one forward and backward; by default all of an optimizer step."""
    learning_rate: float = Field(1e-5, gt=0)
    """Constant, of AdamW."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature of rollouts."""
    top_p: float = Field(0.95, gt=0, le=1)
    """Nucleus of rollouts; 1 truncates nothing."""
    top_k: int = Field(50, ge=0)
    """Most ids a token of a rollout is drawn from; 0 for no limit."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Least probability of an id, relative to the likeliest."""
    repetition_penalty: float = Field(1.0, gt=0)
    """Divides the logits of ids that are there already."""
    max_tokens: int | None = Field(None, ge=1)
    """Most tokens of a completion; by default the task's."""
    beta: float = Field(0.0, ge=0)
    """Weight of the KL divergence from the starting policy, on the supports."""
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"] = "dapo"
    """TRL's name of the loss."""
    epsilon: float = Field(0.2, gt=0)
    """Clip range of the ratio to the policy of the generation."""
    replay: bool = True
    """Score on the recorded supports; off scores on the whole vocabulary, as a control."""
    importance_correction: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = (
        "none"
    )
    """Multiply advantages by capped trainer/engine ratios."""
    importance_cap: float = Field(2.0, gt=0)
    """The largest ratio that is not cut or masked."""
    lora_rank: int = Field(0, ge=0)
    """Train adapters of this rank on every linear layer but the head; 0 trains all weights."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the trained weights, and of the engine's."""
    rollouts: str = "embedded"
    """embedded, or the URL of a keepmask server that serves the same model."""
    held_out: int = Field(24, ge=0)
    """Problems whose questions are never trained on, to measure with; 0 measures nothing."""
    held_out_completions: int = Field(4, ge=1)
    """Completions of each held-out problem."""
    eval_every: int = Field(5, ge=1)
    """Steps between measurements on held-out problems; one is made before and one after training as well."""
    save_every: int = Field(0, ge=0)
    """Steps between checkpoints to resume from; 0 keeps the trained model alone."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Of problems, draws and adapters."""
    report_to: list[str] = Field(default_factory=lambda: ["none"])
    """Trackers that TRL logs to as well: tensorboard, trackio, wandb."""

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            inner = problem.get("ctx", {}).get("error")
            if isinstance(inner, ConfigError):
                raise inner from None
            name = ".".join(map(str, problem["loc"]))
            if problem["type"] == "extra_forbidden":
                known = ", ".join(sorted(type(self).model_fields))
                raise ConfigError(f"{name}: unknown training option; known are {known}") from None
            raise ConfigError(f"{name}={problem['input']!r}: {problem['msg'].removeprefix('Input ')}") from None

    @classmethod
    def read(cls, file: Path | None, changes: dict[str, Any]) -> Self:
        """The fields of a JSON or TOML file, `changes` going over them. Raises ConfigError where it is neither."""
        fields: Any = {}
        if file is not None:
            text = file.read_text()
            try:
                fields = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
            except ValueError as error:
                raise ConfigError(f"{file}: not a config file: {error}; write JSON, or TOML in a .toml file") from error
            if not isinstance(fields, dict):
                raise ConfigError(f"{file}: must hold an object of options, got {type(fields).__name__}")
        return cls(**fields | changes)

    @property
    def completions(self) -> int:
        """Completions of one generation."""
        return self.prompts_per_step * self.num_generations

    @property
    def per_update(self) -> int:
        """Completions of one optimizer step."""
        return self.completions // self.updates_per_generation

    @property
    def micro_batch(self) -> int:
        """Completions of one forward and backward."""
        return self.micro_batch_size or self.per_update

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.completions % self.updates_per_generation:
            raise ConfigError(
                f"updates_per_generation={self.updates_per_generation}: must divide the {self.completions} completions "
                "of a generation (prompts_per_step * num_generations)"
            )
        if self.per_update % self.micro_batch:
            raise ConfigError(
                f"micro_batch_size={self.micro_batch_size}: must divide the {self.per_update} completions of an update"
            )
        cycle = self.updates_per_generation * self.num_iterations
        if self.save_every % cycle:
            raise ConfigError(
                f"save_every={self.save_every}: must be a multiple of {cycle} (updates_per_generation * "
                "num_iterations), as a generation that is half trained on cannot be resumed"
            )
        return self
