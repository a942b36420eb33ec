"""GRPO with and without replay: the same seeds, task and budget under truncated sampling.

A small transformer is first taught to sort four numbers, badly. Then GRPO trains it from exact rewards, in seven ways:
without truncation; and for each of two truncated samplers with replay, without, and without but with truncated
importance sampling (TIS). Rollouts serve several updates and two passes, so all but the first update are off-policy.

    python examples/with_and_without.py --output evidence --write docs
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback

from keepmask.integrations.trl import ReplayGRPOConfig, ReplayGRPOTrainer

NUMBERS, LENGTH = 100, 4
WORDS = ["<pad>", "<eos>", ">", *map(str, range(NUMBERS))]
PAD, EOS = 0, 1
SAMPLERS = {
    "top_p 0.8": {"top_p": 0.8, "top_k": 0},
    "top_p 0.95, top_k 50": {"top_p": 0.95, "top_k": 50},
}
WAYS = {
    "replay": {"replay": True},
    "no replay": {"replay": False},
    "no replay, TIS": {"replay": False, "importance_correction": "token_truncate", "importance_cap": 2.0},
}
ARMS = {
    "nothing truncated": {"top_p": 1.0, "top_k": 0, "replay": True},
    **{f"{sampler}: {way}": params | how for sampler, params in SAMPLERS.items() for way, how in WAYS.items()},
}
PROMPTS, GENERATIONS, UPDATES, PASSES = 32, 8, 4, 2
HELD_OUT = 256
BEGIN, END = "<!-- numbers: examples/with_and_without.py -->", "<!-- end of numbers -->"


def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


def problem(rng: random.Random) -> tuple[str, str]:
    numbers = [rng.randrange(NUMBERS) for _ in range(LENGTH)]
    return f"{' '.join(map(str, numbers))} >", " ".join(map(str, sorted(numbers)))


def exact(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """1 for the four numbers in order and nothing else."""
    return [float(text.split() == right.split()) for text, right in zip(completions, answer, strict=True)]


def erring(answer: str, rng: random.Random) -> list[str]:
    """The teacher: every other answer is the wrong way round, and one number in ten is off by about three."""
    numbers = [int(n) + (round(rng.gauss(0, 3)) if rng.random() < 0.1 else 0) for n in answer.split()]
    return [str(min(max(n, 0), NUMBERS - 1)) for n in numbers][:: rng.choice((1, -1))]


def warm_start(folder: Path, steps: int) -> float:
    """Teach a fresh model from a teacher that errs, and save it; returns the last loss."""
    torch.manual_seed(0)
    rng = random.Random(0)
    settings = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=32, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None,
        tie_word_embeddings=False,
    )  # fmt: skip
    model, words = LlamaForCausalLM(settings), tokenizer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1, (step + 1) / 50) * (1 - step / steps)
        texts = []
        for _ in range(128):
            question, answer = problem(rng)
            texts.append(f"{question} {' '.join(erring(answer, rng))} <eos>")
        ids = torch.tensor(words(texts)["input_ids"])
        labels = ids.clone()
        labels[:, : LENGTH + 1] = -100
        loss = model(ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return loss.item()


class Measure:
    """Held-out accuracy, and how far the policy is from where it began, over the whole vocabulary."""

    def __init__(self, trainer: ReplayGRPOTrainer, start: torch.nn.Module) -> None:
        rng = random.Random(12345)
        self.trainer, self.start = trainer, start
        self.problems = [problem(rng) for _ in range(HELD_OUT)]
        self.prompts = trainer.processing_class([question for question, _ in self.problems])["input_ids"]

    def accuracy(self, **sampling: float) -> float:
        drawn = self.trainer.draw(self.prompts, seed=7, **sampling)
        texts = self.trainer.processing_class.batch_decode(
            [each[0].token_ids for each in drawn], skip_special_tokens=True
        )
        self.drawn = [each[0] for each in drawn]
        return float(np.mean(exact(texts, [answer for _, answer in self.problems])))

    @torch.no_grad()
    def row(self) -> dict[str, float]:
        row = {"accuracy_greedy": self.accuracy(temperature=0.0), "accuracy_as_trained": self.accuracy()}
        row["accuracy_untruncated"] = self.accuracy(top_p=1.0, top_k=0)
        ids = [[*r.prompt_token_ids.tolist(), *r.token_ids.tolist()] for r in self.drawn]
        width = max(map(len, ids))
        tokens = torch.tensor([each + [PAD] * (width - len(each)) for each in ids])
        drawn = torch.tensor([[LENGTH + 1 <= t < len(each) for t in range(1, width)] for each in ids])
        new, old = (m(tokens).logits[:, :-1].log_softmax(-1) for m in (self.trainer.model, self.start))
        row["entropy_full"] = float(-(new.exp() * new).sum(-1)[drawn].mean())
        row["kl_from_start"] = float((new.exp() * (new - old)).sum(-1)[drawn].mean())
        return row


class Recorder(PrinterCallback):
    """A row for each update, and one for each measurement; it takes the place of the callback that prints."""

    def __init__(self, measure: Measure, every: int, tags: dict[str, object]) -> None:
        self.measure, self.every, self.tags, self.rows = measure, every, tags, []

    def on_log(self, args, state, control, logs=None, **_):  # noqa: ANN001, ANN003, ANN201
        if logs and "loss" in logs:
            keys = {"reward", "entropy", "grad_norm", "clip_ratio/region_mean"}
            kept = {key: value for key, value in logs.items() if key in keys or key.startswith("replay/")}
            self.rows.append(self.tags | {"step": state.global_step} | kept)

    def on_step_begin(self, args, state, control, **_):  # noqa: ANN001, ANN003, ANN201
        if state.global_step % self.every == 0:
            self.take(state.global_step)

    def take(self, step: int) -> None:
        self.rows.append(self.tags | {"step": step} | self.measure.row())


def run(arm: str, seed: int, folder: Path, generations: int, learning_rate: float) -> list[dict[str, object]]:
    """One arm with one seed."""
    rng = random.Random(1000 + seed)
    problems = [problem(rng) for _ in range(generations * PROMPTS)]
    steps = generations * UPDATES * PASSES
    with tempfile.TemporaryDirectory() as scratch:
        args = ReplayGRPOConfig(
            scratch,
            **ARMS[arm],
            num_generations=GENERATIONS,
            per_device_train_batch_size=PROMPTS * GENERATIONS // UPDATES,
            steps_per_generation=UPDATES,
            num_iterations=PASSES,
            max_steps=steps,
            learning_rate=learning_rate,
            lr_scheduler_type="constant",
            max_completion_length=LENGTH + 2,
            seed=seed,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            bf16=False,
            use_cpu=True,
            disable_tqdm=True,
            gradient_checkpointing=False,
            mass_samples=64,
            rollout_options={"max_model_len": 16, "max_num_seqs": HELD_OUT, "kv_cache_memory_bytes": 2**24},
        )
        model, start = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
        data = {"prompt": [question for question, _ in problems], "answer": [answer for _, answer in problems]}
        trainer = ReplayGRPOTrainer(
            model, exact, args, train_dataset=Dataset.from_dict(data), processing_class=tokenizer()
        )
        trainer.remove_callback(PrinterCallback)
        recorder = Recorder(Measure(trainer, start), steps // 5, {"arm": arm, "seed": seed})
        trainer.add_callback(recorder)
        trainer.train()
        recorder.take(steps)
    return recorder.rows


MEASURED = {
    "accuracy_as_trained": "accuracy, sampled as trained",
    "accuracy_untruncated": "accuracy, nothing truncated",
    "accuracy_greedy": "accuracy, greedy",
    "kl_from_start": "KL from the start, nats",
    "entropy_full": "entropy over the vocabulary, nats",
}
TRAINED = {
    "replay/ratio_full_mean": "ratio at the first pass, whole vocabulary",
    "replay/ratio_replayed_mean": "ratio at the first pass, as scored",
    "replay/ratio_replayed_outside_0.1": "of these outside [0.9, 1.1]",
    "replay/logprob_diff_max": "largest trainer - engine, nats",
    "replay/ratio_stale_outside_0.1": "stale ratios outside [0.9, 1.1]",
    "clip_ratio/region_mean": "clipped ratios",
    "grad_norm": "gradient norm",
}


def table(rows: list[dict[str, object]]) -> str:
    """Measurements at the end, and means over all updates: the mean of the seeds, and their standard deviation."""
    arms = [arm for arm in ARMS if any(row["arm"] == arm for row in rows)]
    seeds = sorted({row["seed"] for row in rows})
    last = max(row["step"] for row in rows)
    lines = [f"| | {' | '.join(arms)} |", "|---|" + "---|" * len(arms)]
    for name, label in (MEASURED | TRAINED).items():
        cells = []
        for arm in arms:
            by_seed = []
            for seed in seeds:
                own = [row for row in rows if (row["arm"], row["seed"]) == (arm, seed) and name in row]
                own = [row for row in own if row["step"] == last] if name in MEASURED else own
                values = [row[name] for row in own]
                if values:
                    by_seed.append(max(values) if name.endswith("max") else float(np.mean(values)))
            cells.append(cell(by_seed))
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(values: list[float]) -> str:
    if not values:
        return ""
    if max(values) < 1e-3:
        return f"{max(values):.1g}" if max(values) else "0"
    spread = f" ± {np.std(values, ddof=1):.3f}" if len(values) > 1 else ""
    return f"{np.mean(values):.3f}{spread}"


def figure(rows: list[dict[str, object]], path: Path) -> None:
    """Curves over updates, a row of panels for each sampler; bands reach from the least to the largest seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = {
        "accuracy_as_trained": "held-out accuracy, sampled as trained",
        "accuracy_untruncated": "held-out accuracy, nothing truncated",
        "kl_from_start": "KL from the start, nats",
        "grad_norm": "gradient norm",
    }
    colours = {"replay": "#1667c7", "no replay": "#d9730d", "no replay, TIS": "#8a4fbf"}
    figure, axes = plt.subplots(2, len(panels), figsize=(16, 7), sharex=True)
    for line, sampler in zip(axes, SAMPLERS, strict=True):
        curves = {"nothing truncated": "#8b929a"} | {f"{sampler}: {way}": colour for way, colour in colours.items()}
        for axis, (name, title) in zip(line, panels.items(), strict=True):
            for arm, colour in curves.items():
                points: dict[int, list[float]] = {}
                for row in rows:
                    if row["arm"] == arm and name in row:
                        width = UPDATES * PASSES if name == "grad_norm" else 1  # a point for each generation
                        points.setdefault(-(-row["step"] // width) * width, []).append(row[name])
                at = sorted(points)
                axis.plot(at, [np.mean(points[x]) for x in at], color=colour, label=arm.split(": ")[-1])
                low, high = ([end(points[x]) for x in at] for end in (min, max))
                axis.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
            axis.set_title(f"{sampler}\n{title}", fontsize=10)
            axis.grid(alpha=0.25)
    axes[0][0].legend(fontsize=9, frameon=False)
    for axis in axes[1]:
        axis.set_xlabel("update")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def write(rows: list[dict[str, object]], docs: Path) -> None:
    """Put the table between the marks of evidence.md, and the figure beside it."""
    page = docs / "evidence.md"
    head, _, rest = page.read_text().partition(BEGIN)
    _, _, tail = rest.partition(END)
    seeds = len({row["seed"] for row in rows})
    note = f"{seeds} seeds; mean ± standard deviation over seeds. Figure bands: least to largest seed."
    page.write_text(f"{head}{BEGIN}\n\n{note}\n\n{table(rows)}\n\n{END}{tail}")
    figure(rows, docs / "evidence.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("evidence"), help="folder for rows.jsonl and the figure")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--generations", type=int, default=10)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--warm-steps", type=int, default=400)
    parser.add_argument("--write", type=Path, metavar="DOCS", help="put the table and the figure into this folder")
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS), metavar="ARM")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    args.output.mkdir(parents=True, exist_ok=True)
    folder = args.output / f"start-{args.warm_steps}"
    if not (folder / "config.json").exists():
        warm_start(folder, args.warm_steps)
    rows = args.output / "rows.jsonl"
    lines = rows.read_text().splitlines() if rows.exists() else []
    done = {(row["arm"], row["seed"]) for row in map(json.loads, lines)}
    for seed in args.seeds:
        for arm in args.arms:
            if (arm, seed) in done:
                continue
            started = time.perf_counter()
            found = run(arm, seed, folder, args.generations, args.learning_rate)
            with rows.open("a") as stream:
                stream.write("".join(json.dumps(row) + "\n" for row in found))
            print(arm, seed, f"{time.perf_counter() - started:.0f} s", json.dumps(found[-1]), flush=True)
    if args.write is not None:
        write([json.loads(line) for line in rows.read_text().splitlines()], args.write)


if __name__ == "__main__":
    main()
