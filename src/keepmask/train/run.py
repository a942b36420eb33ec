"""`train`: one run from a `TrainConfig`, its metrics a line a step."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from keepmask import __version__
from keepmask.errors import ConfigError
from keepmask.integrations.replay_meter import RATIO_EDGES
from keepmask.integrations.trl import ReplayGRPOConfig, ReplayGRPOTrainer
from keepmask.models import bundled
from keepmask.progress import Progress
from keepmask.train.tasks import Problem, Task, task_named
from keepmask.train.train_config import TrainConfig
from keepmask.wire.rollout_file import RolloutWriter

__all__ = ["METRICS", "RUN", "SAMPLES", "describe", "train"]

METRICS, RUN, SAMPLES = "metrics.jsonl", "run.json", "samples.parquet"
"""Files of a run's folder: a line a step, how it was configured, and the latest held-out completions."""

_NAMES = {
    "loss": "loss",
    "reward": "reward",
    "reward_std": "reward_std",
    "entropy": "entropy",
    "kl": "kl",
    "grad_norm": "grad_norm",
    "clip_ratio/region_mean": "clipped",
    "frac_reward_zero_std": "groups_without_signal",
    "completions/mean_length": "completion_tokens",
}
"""TRL's names and those of metrics.jsonl."""

_HELD_OUT_SEED = 2**40  # of the draws on held-out problems, the same at each measurement


def describe(config: TrainConfig) -> dict[str, Any]:
    """Everything a run would be made of, without loading a model."""
    task = task_named(config.task)
    held_out = task.held_out(config.held_out, config.seed)
    training = task.training(1, config.seed, held_out)
    return {
        "config": config.model_dump(),
        "model": str(_checkpoint(config)),
        "task": {
            "name": task.name,
            "summary": task.summary,
            "prompt": training[0].prompt,
            "answer": training[0].answer,
        },
        "held_out_problems": len(held_out),
        "completions_per_generation": config.completions,
        "completions_per_update": config.per_update,
        "completions_per_forward": config.micro_batch,
        "max_tokens": config.max_tokens or task.max_tokens,
        "generations": _generations(config),
        "versions": {
            "keepmask": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "trl": trl.__version__,
        },
        "threads": torch.get_num_threads(),
    }


def train(config: TrainConfig, output: Path, *, resume: bool = False, overwrite: bool = False) -> dict[str, Any]:
    """Train into the folder `output`; returns the last line of its metrics that has a held-out reward.

    resume: go on from the latest checkpoint of the same run. Raises ConfigError where there is a run already, or none
    to resume.
    """
    output.mkdir(parents=True, exist_ok=True)
    checkpoint = get_last_checkpoint(str(output)) if resume else None
    metrics = output / METRICS
    if resume:
        _check_same_run(config, output, checkpoint)
    elif metrics.exists() and not overwrite:
        raise ConfigError(f"{output}: holds a run already; --resume goes on with it, --overwrite starts afresh")
    (output / RUN).write_text(json.dumps(describe(config) | {"ratio_edges": RATIO_EDGES}, indent=1) + "\n")
    first = int(checkpoint.rsplit("-", 1)[1]) if checkpoint else 0
    _keep_lines(metrics, first)
    task = task_named(config.task)
    held_out = task.held_out(config.held_out, config.seed)
    trainer = _trainer(config, task, held_out, output)
    trainer.remove_callback(PrinterCallback)
    with Progress(config.steps, label=f"Training {task.name}", done=first) as progress, metrics.open("a") as stream:
        recorder = _Recorder(config, trainer, held_out, stream, progress)
        trainer.add_callback(recorder)
        trainer.train(resume_from_checkpoint=checkpoint)
        recorder.measure()
        trainer.save_model(str(output / "model"))
    recorder.write_samples(output / SAMPLES)
    return recorder.latest


class _Recorder(TrainerCallback):  # type: ignore[misc]
    """Writes metrics.jsonl and measures on held-out problems."""

    def __init__(
        self, config: TrainConfig, trainer: ReplayGRPOTrainer, held_out: list[Problem], stream: Any, progress: Progress
    ) -> None:
        self._trainer, self._task, self._held_out = trainer, task_named(config.task), held_out
        self._every, self._repeats = config.eval_every, config.held_out_completions
        self._stream, self._progress = stream, progress
        self._prompts = [trainer.processing_class(problem.prompt)["input_ids"] for problem in held_out]
        self._since = time.perf_counter()
        self._num_tokens = 0
        self._measured_at = -1
        self._samples: list[Any] = []
        self.latest: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Measure the starting policy."""
        if state.global_step == 0:
            self.measure()
        self._since = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Write the line of a step."""
        if not logs or "loss" not in logs:
            return
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        phases = {name.removeprefix("seconds/"): value for name, value in logs.items() if name.startswith("seconds/")}
        line = {"step": state.global_step} | {ours: logs[name] for name, ours in _NAMES.items() if name in logs}
        line |= {name.removeprefix("replay/"): value for name, value in logs.items() if name.startswith("replay/")}
        drawn, self._num_tokens = self._trainer.num_drawn_tokens - self._num_tokens, self._trainer.num_drawn_tokens
        line |= {"tokens": drawn, "tokens_per_s": drawn / seconds, "seconds": seconds}
        line |= {f"seconds_{name}": phases.get(name, 0.0) for name in ("rollout", "sync", "scoring")}
        line["seconds_update"] = seconds - sum(phases.values())
        self._write(line | self._trainer.histograms)
        self._progress.update(state.global_step, self._num_tokens)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Measure where it is due."""
        if state.global_step and state.global_step % self._every == 0:
            self.measure()

    def measure(self) -> None:
        """Write a line with the reward on held-out problems; the clock of the steps stands still."""
        step = self._trainer.state.global_step
        if not self._held_out or step == self._measured_at:
            return
        started = time.perf_counter()
        drawn = self._trainer.draw(self._prompts, [self._repeats] * len(self._prompts), seed=_HELD_OUT_SEED)
        rollouts = [rollout for each in drawn for rollout in each]
        problems = [problem for problem in self._held_out for _ in range(self._repeats)]
        texts = self._trainer.processing_class.batch_decode([r.token_ids for r in rollouts], skip_special_tokens=True)
        rewards = [self._task.reward(text, p) for text, p in zip(texts, problems, strict=True)]
        known = [reward for reward in rewards if reward is not None]
        seconds = time.perf_counter() - started
        self._measured_at, self._samples = step, rollouts
        self.latest = {
            "step": step,
            "heldout_reward": sum(known) / max(len(known), 1),
            "heldout_completions": len(known),
            "seconds_heldout": seconds,
        }
        self._write(self.latest)
        self._since += seconds
        self._trainer.phase_seconds = {}
        self._num_tokens = self._trainer.num_drawn_tokens

    def write_samples(self, path: Path) -> None:
        """The latest held-out completions, with their masks, as a rollout file."""
        if not self._samples:
            return
        tokenizer = self._trainer.processing_class
        metadata = {
            "model": str(self._trainer.model.config.name_or_path),
            "sampling_params": self._trainer.sampling_params.model_dump(exclude_defaults=True),
        }

        def pieces(ids: Any) -> list[str]:
            return [tokenizer.decode([token_id]) for token_id in ids]

        named = [replace(rollout, request_id=f"held-out-{index:04d}") for index, rollout in enumerate(self._samples)]
        with RolloutWriter(path, metadata, token_text=pieces, overwrite=True) as writer:
            writer.write(named)
            writer.finish()

    def _write(self, line: dict[str, Any]) -> None:
        self._stream.write(json.dumps(line) + "\n")
        self._stream.flush()


def _trainer(config: TrainConfig, task: Task, held_out: list[Problem], output: Path) -> ReplayGRPOTrainer:
    folder = str(_checkpoint(config))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, config.dtype))
    problems = task.training(_generations(config) * config.prompts_per_step, config.seed, held_out)
    max_tokens = config.max_tokens or task.max_tokens
    options: dict[str, Any] = {}
    if config.rollouts == "embedded":
        longest = max(map(len, tokenizer([problem.prompt for problem in [*problems, *held_out]])["input_ids"]))
        options = {"max_model_len": longest + max_tokens, "max_num_seqs": max(config.completions, 64)}
    accumulation = config.per_update // config.micro_batch
    own = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "num_iterations", "learning_rate", "beta"}
    own |= {"loss_type", "epsilon", "seed", "report_to", "replay", "rollouts", "importance_correction"}
    args = ReplayGRPOConfig(
        str(output),
        **config.model_dump(include={*own, "importance_cap", "num_generations"}),
        rollout_options=options,
        max_completion_length=max_tokens,
        generation_kwargs={"stop_token_ids": _line_ends(tokenizer)},
        per_device_train_batch_size=config.micro_batch,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation * config.updates_per_generation,
        max_steps=config.steps,
        save_strategy="steps" if config.save_every else "no",
        save_steps=config.save_every or config.steps,
        save_total_limit=2,
        logging_steps=1,
        lr_scheduler_type="constant",
        shuffle_dataset=False,  # problems are random as they are, and a longer run then begins with the same ones
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    rows = {"prompt": [problem.prompt for problem in problems], "number": list(range(len(problems)))}
    return ReplayGRPOTrainer(
        model,
        _reward(task, problems),
        args,
        train_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer,
        peft_config=_adapters(config),
    )


def _reward(task: Task, problems: list[Problem]) -> Callable[..., list[float | None]]:
    """The task's reward as TRL calls it."""

    def reward(completions: list[str], number: list[int], **_: Any) -> list[float | None]:
        return [task.reward(text, problems[index]) for text, index in zip(completions, number, strict=True)]

    reward.__name__ = task.name
    return reward


def _adapters(config: TrainConfig) -> Any:
    if not config.lora_rank:
        return None
    from peft import LoraConfig

    return LoraConfig(r=config.lora_rank, lora_alpha=2 * config.lora_rank, target_modules="all-linear")


def _line_ends(tokenizer: Any) -> list[int]:
    """The tokens that end an answer: the end of text, and those that are nothing but ends of lines."""
    pieces = [tokenizer.encode(end, add_special_tokens=False) for end in ("\n", "\n\n")]
    ends = {piece[0] for piece in pieces if len(piece) == 1} | {tokenizer.eos_token_id}
    return sorted(ends)


def _generations(config: TrainConfig) -> int:
    return -(-config.steps // (config.updates_per_generation * config.num_iterations))


def _checkpoint(config: TrainConfig) -> Path | str:
    return bundled.path(config.model) if config.model in bundled.NAMES else config.model


def _check_same_run(config: TrainConfig, output: Path, checkpoint: str | None) -> None:
    if checkpoint is None:
        raise ConfigError(f"{output}: holds no checkpoint to resume from; save_every says how often one is kept")
    before = json.loads((output / RUN).read_text())["config"]
    now = config.model_dump()
    differ = [name for name in now if name not in ("steps", "eval_every") and before.get(name) != now[name]]
    if differ:
        named = ", ".join(f"{name}={before.get(name)!r}" for name in differ)
        raise ConfigError(f"{output}: was begun with {named}; resume with the same options, or train elsewhere")


def _keep_lines(metrics: Path, step: int) -> None:
    """Leave the lines of a file that are not after `step`: the steps after a checkpoint are taken again."""
    lines = metrics.read_text().splitlines() if step and metrics.exists() else []
    kept = [line for line in lines if json.loads(line)["step"] <= step]
    metrics.write_text("".join(f"{line}\n" for line in kept))
