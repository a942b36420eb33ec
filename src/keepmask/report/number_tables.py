"""The numbers of a report as HTML tables."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

__all__ = ["count", "number", "numbers_table", "plural", "ratio_table", "share"]

MINUS = "\N{MINUS SIGN}"

_RATIO_ROWS = (
    ("mean", "ratio_{}_mean", "4"),
    ("median", "ratio_{}_median", "4"),
    ("outside [0.9, 1.1]", "ratio_{}_outside_0.1", "%"),
    ("mean log-ratio, nats", "log_ratio_{}_mean", "4"),
)
_NAMES = {
    "kept_mass_mean": ("mass kept by the support, mean", "4"),
    "mass_outside_mean": ("mass cut off, mean", "4"),
    "logprob_diff_max": ("|replayed \N{MINUS SIGN} rollout| log-prob, max, nats", "e"),
    "logprob_diff_mean": ("|replayed \N{MINUS SIGN} rollout| log-prob, mean, nats", "e"),
    "support_size_mean": ("support size, mean", "1"),
    "support_size_median": ("support size, median", "g"),
    "support_size_p99": ("support size, 99th percentile", "g"),
    "support_singleton_share": ("tokens with one possible id", "%"),
    "num_rows_of_unknown_width": ("tokens drawn from the whole vocabulary", "n"),
    "num_tokens": ("tokens", "n"),
    "tokens_per_s": ("tokens per second", "n"),
}


def number(value: float, form: str = "4") -> str:
    """A number as the report writes it. form: digits after the point, % (share), e (exponent), g, or n (whole)."""
    if form == "%":
        return share(value)
    if form == "n":
        return count(round(value))
    if form == "e":
        return f"{value:.1e}".replace("-", MINUS) if value else "0"
    tiny = form.isdecimal() and 0 < abs(value) < 0.5 * 10 ** -int(form)
    text = f"{value:.4g}" if form == "g" else f"{value:.1e}" if tiny else f"{value:,.{form}f}"
    return text.replace("-", MINUS)


def count(value: int) -> str:
    """A whole number with thousands set apart."""
    return f"{value:,}"


def share(value: float) -> str:
    """A share as a percentage."""
    percent = 100 * value
    return f"{percent:.2f} %" if 0 < percent < 10 else f"{percent:.1f} %" if 0 < percent < 100 else f"{percent:.0f} %"


def ratio_table(table: Mapping[str, float]) -> str:
    """Importance ratios over the whole vocabulary beside the replayed ones; "" where none were measured."""
    rows = []
    for label, name, form in _RATIO_ROWS:
        values = [table.get(name.format(kind)) for kind in ("full", "replayed")]
        if any(value is not None for value in values):
            cells = "".join(f"<td>{'' if value is None else number(value, form)}</td>" for value in values)
            rows.append(f'<tr><th scope="row">{label}</th>{cells}</tr>')
    if not rows:
        return ""
    return (
        '<table class="numbers"><thead><tr><th scope="col">importance ratio</th>'
        '<th scope="col"><i class="key full"></i>full vocabulary</th>'
        f'<th scope="col"><i class="key replayed"></i>replayed</th></tr></thead><tbody>{"".join(rows)}</tbody></table>'
    )


def numbers_table(table: Mapping[str, float]) -> str:
    """Every other number, known names first, in words; unknown names as they are."""
    paired = {name.format(kind) for _, name, _ in _RATIO_ROWS for kind in ("full", "replayed")}
    others = [name for name in table if name not in paired and name not in _NAMES]
    dull = {"num_rows_of_unknown_width"} if not table.get("num_rows_of_unknown_width") else set()
    rows = []
    for name in [*(name for name in _NAMES if name in table and name not in dull), *others]:
        label, form = _NAMES.get(name, (name, "g"))
        rows.append(f'<tr><th scope="row">{escape(label)}</th><td>{number(table[name], form)}</td></tr>')
    return f'<table class="numbers"><tbody>{"".join(rows)}</tbody></table>' if rows else ""


def plural(value: int) -> str:
    """The ending of a noun after this number."""
    return "" if value == 1 else "s"
