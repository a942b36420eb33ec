"""`write_run_report`: a training run's metrics as one HTML page, alone or over another run's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from keepmask import __version__
from keepmask.errors import ConfigError
from keepmask.report.completions import completions_section
from keepmask.report.excerpt import Excerpt, visible
from keepmask.report.number_tables import number
from keepmask.report.page import document, figure, tile
from keepmask.report.run_curves import Curve, curves_chart, histogram_chart, phase_chart
from keepmask.wire.atomic_files import write_atomically
from keepmask.wire.rollout_file import read_rollouts

__all__ = ["Run", "write_run_report"]

_METRICS, _RUN, _SAMPLES = "metrics.jsonl", "run.json", "samples.parquet"
_PHASES = ("rollout", "sync", "scoring", "update")
_FACTS = (
    "top_p",
    "top_k",
    "temperature",
    "learning_rate",
    "num_generations",
    "updates_per_generation",
    "dtype",
    "seed",
)
_MAX_SAMPLES, _MAX_TOKENS = 24, 4000


@dataclass(frozen=True)
class Run:
    """The lines of a run's metrics.jsonl, and how it was configured."""

    name: str
    settings: dict[str, Any]
    steps: list[dict[str, Any]]
    """Lines of training steps."""
    measured: list[dict[str, Any]]
    """Lines with a held-out reward."""

    @classmethod
    def read(cls, folder: Path) -> Run:
        """The run in a folder. Raises ConfigError where there is none, or a line that is no JSON object."""
        path = folder / _METRICS
        if not path.is_file():
            raise ConfigError(f"{folder}: holds no {_METRICS}; give the folder that keepmask train wrote")
        lines = []
        for at, text in enumerate(path.read_text().splitlines(), 1):
            try:
                lines.append(dict(json.loads(text)))
            except (ValueError, TypeError):
                raise ConfigError(f"{path}, line {at}: is no JSON object") from None
        settings = json.loads((folder / _RUN).read_text()) if (folder / _RUN).is_file() else {}
        steps = [line for line in lines if "heldout_reward" not in line]
        return cls(folder.name, settings, steps, [line for line in lines if "heldout_reward" in line])

    def points(self, name: str) -> list[tuple[float, float]]:
        """(step, value) of every line that has the metric."""
        lines = self.measured if name == "heldout_reward" else self.steps
        return [(line["step"], line[name]) for line in lines if isinstance(line.get(name), int | float)]


def write_run_report(path: Path, folder: Path, *, compare: Path | None = None) -> Path:
    """Write the page of the run in `folder`, the curves of another run dashed where `compare` names one."""
    run = Run.read(folder)
    other = None if compare is None else Run.read(compare)
    samples, data = _samples(folder)
    body = [
        _header(run, other),
        _tiles(run, other),
        f'<section class="charts" aria-label="Charts">{"".join(_figures(run, other))}</section>',
        samples,
        f"<footer>keepmask {escape(__version__)} · nothing on this page is loaded from elsewhere</footer>",
    ]
    page = document(f"{run.name} · keepmask run", "".join(body), data)
    with write_atomically(path) as stream:
        stream.write(page.encode("utf-8", "replace"))
    return path


def _header(run: Run, other: Run | None) -> str:
    config, task = run.settings.get("config", {}), run.settings.get("task", {})
    facts = [f"task {task['name']}"] if task else []
    facts += [f"model {Path(str(config['model'])).name}"] if "model" in config else []
    facts += [f"{len(run.steps)} steps"]
    facts += [f"{name.replace('_', ' ')} {config[name]}" for name in _FACTS if name in config]
    facts += [] if config.get("replay", True) else ["replay off"]
    items = "".join(f"<li>{escape(visible(fact))}</li>" for fact in facts)
    over = f' <span class="versus">dashed: {escape(visible(other.name))}</span>' if other else ""
    return (
        '<header><p class="brand">keepmask <span>training run</span></p>'
        '<button id="theme" type="button" hidden>Theme: auto</button>'
        f'<h1>{escape(visible(run.name))}{over}</h1><ul class="facts">{items}</ul></header>'
    )


def _tiles(run: Run, other: Run | None) -> str:
    tiles = []
    if held := run.points("heldout_reward"):
        values = f"{number(held[0][1], '3')}<i>→</i>{number(held[-1][1], '3')}"
        detail = f"step {held[0][0]:g} → {held[-1][0]:g}"
        theirs = other.points("heldout_reward") if other else []
        detail += f"; {escape(other.name)}: {number(theirs[-1][1], '3')}" if other and theirs else ""
        tiles.append(tile("Held-out reward", values, detail))
    full, replayed = run.points("ratio_full_mean"), run.points("ratio_replayed_mean")
    if full and replayed:
        before, after = (sum(value for _, value in each) / len(each) for each in (full, replayed))
        big = (
            f'<span class="full">{number(before, "3")}</span><i>→</i><span class="replayed">{number(after, "3")}</span>'
        )
        tiles.append(tile("Importance ratio, first pass", big, "full vocabulary → as scored, mean over steps"))
    if differences := run.points("logprob_diff_max"):
        worst = max(value for _, value in differences)
        tiles.append(tile("Largest |trainer - engine|", f"{worst:.1e}", "nats, first pass, all steps"))
    if speed := run.points("tokens_per_s"):
        seconds = sum(value for _, value in run.points("seconds"))
        tiles.append(
            tile("Tokens drawn", f"{_median([v for _, v in speed]):.0f}/s", f"median; {seconds:,.0f} s of steps")
        )
    return f'<section class="tiles" aria-label="Summary">{"".join(tiles)}</section>' if tiles else ""


def _figures(run: Run, other: Run | None) -> list[str]:
    def curves(*wanted: tuple[str, str, str]) -> list[Curve]:
        found = [Curve(label, style, run.points(name), name == "heldout_reward") for name, style, label in wanted]
        if other is not None:
            found += [
                Curve(f"{other.name}: {label}", f"{style} other", other.points(name), name == "heldout_reward")
                for name, style, label in wanted
            ]
        return [curve for curve in found if curve.points]

    keys = _keys(("full", "full vocabulary"), ("replayed", "as scored"))
    plans: list[tuple[str, str, list[Curve], dict[str, Any]]] = [
        ("Reward", _keys(("replayed", "held out"), ("plain", "training")),
         curves(("reward", "plain", "training"), ("heldout_reward", "replayed", "held out")), {"low": 0.0}),
        ("Mean ratio at the first pass", keys,
         curves(("ratio_full_mean", "full", "full vocabulary"), ("ratio_replayed_mean", "replayed", "as scored")), {}),
        ("Tokens with a ratio outside [0.9, 1.1]", keys,
         curves(("ratio_full_outside_0.1", "full", "full vocabulary"),
                ("ratio_replayed_outside_0.1", "replayed", "as scored")), {"low": 0.0}),
        ("Largest |trainer - engine| at the first pass, nats", "",
         curves(("logprob_diff_max", "replayed", "largest difference")), {"log": True}),
        ("Ratio after updates, outside [0.9, 1.1]", "",
         curves(("ratio_stale_outside_0.1", "replayed", "stale tokens")), {"low": 0.0}),
        ("Probability kept by the supports", "", curves(("kept_mass", "full", "kept mass")), {}),
        ("Ids in a support, mean", "", curves(("support_size", "replayed", "ids")), {"low": 0.0}),
        ("Tokens with one possible id", "", curves(("support_singletons", "replayed", "singletons")), {"low": 0.0}),
        ("Entropy, nats", "", curves(("entropy", "replayed", "entropy")), {"low": 0.0}),
        ("Gradient norm", "", curves(("grad_norm", "replayed", "gradient norm")), {"low": 0.0}),
        ("KL divergence from the starting policy, nats", "", curves(("kl", "replayed", "KL")), {"low": 0.0}),
        ("Share of clipped ratios", "", curves(("clipped", "replayed", "clipped")), {"low": 0.0}),
    ]  # fmt: skip
    figures = [
        figure(title, legend, curves_chart(title, found, **options)) for title, legend, found, options in plans if found
    ]
    edges = run.settings.get("ratio_edges")
    for name, style, label in (("full", "full", "over the vocabulary"), ("replayed", "replayed", "as scored")):
        rows = [
            (line["step"], line[f"ratio_{name}_histogram"]) for line in run.steps if f"ratio_{name}_histogram" in line
        ]
        if rows and edges:
            title = f"Ratios at the first pass, {label}"
            figures.append(figure(title, "", histogram_chart(title, style, edges, rows)))
    if run.points("seconds"):
        steps = [(line["step"], [line.get(f"seconds_{phase}", 0.0) for phase in _PHASES]) for line in run.steps]
        legend = _keys(*((f"p{row}", phase) for row, phase in enumerate(_PHASES)))
        figures.append(figure("Seconds of a step", legend, phase_chart("Seconds of a step", _PHASES, steps)))
    return figures


def _keys(*keys: tuple[str, str]) -> str:
    named = "".join(f'<span><i class="key {style}"></i>{label}</span>' for style, label in keys)
    return f'<span class="keys">{named}</span>'


def _samples(folder: Path) -> tuple[str, Any]:
    """The latest held-out completions, token by token, and the data the page's script needs of them."""
    if not (folder / _SAMPLES).is_file():
        return "", Excerpt([], {}, max_rollouts=0, max_tokens=0, also=[]).data()
    rollouts, metadata = read_rollouts(folder / _SAMPLES)
    rollouts = rollouts[:_MAX_SAMPLES]
    excerpt = Excerpt(
        rollouts, metadata.get("token_text") or {}, max_rollouts=_MAX_SAMPLES, max_tokens=_MAX_TOKENS, also=[]
    )
    return completions_section(rollouts, excerpt), excerpt.data()


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
