"""Bytes and time of a mask on the wire, in every format, against nested JSON.

    scripts/bench wire                    a table
    scripts/bench wire --json             one JSON row a case, format and direction
    scripts/bench wire --rollouts FILE    the masks of a rollout file in place of the recorded ones

The recorded masks (`bench/wire_rollouts.parquet`) are of SmolLM2-135M-Instruct writing prose and code at temperature 1,
with top_k 50 and top_p 0.95, and with top_k 512 and top_p 0.97. Nested JSON is compact, as vLLM's server sends it.
Encoding starts at a `SamplingMask` and ends at bytes; decoding ends at a checked `SamplingMask`. The formats of a case
are timed in turn in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from keepmask.bench.machine import machine_facts
from keepmask.bench.timing import Row, arguments, in_turn, quantiles, report
from keepmask.mask import SamplingMask
from keepmask.wire import decode_arrow, decode_json, encode_arrow, encode_json, read_rollouts

RECORDED = Path(__file__).parents[3] / "bench" / "wire_rollouts.parquet"
FORMATS: dict[str, tuple[Callable[[SamplingMask], bytes], Callable[[bytes], SamplingMask]]] = {
    "nested JSON": (encode_json, decode_json),
    "base64": (partial(encode_json, form="base64"), decode_json),
    "arrow": (encode_arrow, decode_arrow),
}
SECONDS = 0.4


def cases(file: Path) -> dict[str, SamplingMask]:
    """One completion, all completions of a setting in one mask, and the same with a log-probability an id."""
    settings: dict[str, list[SamplingMask]] = {}
    for rollout in read_rollouts(file)[0]:
        if rollout.sampling_mask is not None:
            name = ", ".join(f"{key} {value}" for key, value in rollout.sampling_params.items() if "top" in key)
            settings.setdefault(name, []).append(rollout.sampling_mask)
    found = {}
    for name, masks in settings.items():
        masks = [SamplingMask(mask.ids, mask.offsets) for mask in masks]
        found[f"{name}: one completion"] = max(masks, key=len)
        found[f"{name}: {len(masks)} completions"] = every = SamplingMask.concat(masks)
        logprobs = -np.random.default_rng(0).exponential(2, every.ids.size)
        found[f"{name}: with logprobs"] = SamplingMask(every.ids, every.offsets, logprobs.astype(np.float32))
    return found


def measure(case: str, mask: SamplingMask) -> Iterator[Row]:
    """Encoding and decoding in every format."""
    encoded = {name: encode(mask) for name, (encode, _) in FORMATS.items()}
    assert all(FORMATS[name][1](data) == mask for name, data in encoded.items())
    directions: dict[str, dict[str, Callable[[], object]]] = {
        "encode": {name: partial(encode, mask) for name, (encode, _) in FORMATS.items()},
        "decode": {name: partial(FORMATS[name][1], data) for name, data in encoded.items()},
    }
    found = {
        way: {name: quantiles(values) for name, values in in_turn(runs, seconds=SECONDS).items()}
        for way, runs in directions.items()
    }
    for name, data in encoded.items():
        both = {form: sum(times[form]["p50"] for times in found.values()) for form in FORMATS}
        for way, times in found.items():
            yield {
                "op": f"wire {way}",
                "case": case,
                "implementation": name,
                "shape": [len(mask), mask.ids.size],
                "dtype": "int32" if mask.logprobs is None else "int32 + float32",
                "unit": "ms",
                **times[name],
                "bytes": len(data),
                "bytes_an_id": len(data) / mask.ids.size,
                "bytes_over_json": len(data) / len(encoded["nested JSON"]),
                "both_over_json": both[name] / both["nested JSON"],
            }


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--rollouts", type=Path, default=RECORDED, help="a rollout file to take the masks from")
    args = parser.parse_args()
    rows = (row for case, mask in cases(args.rollouts).items() for row in measure(case, mask))
    report(rows, machine_facts() | {"threads": 1}, None if args.json else LINE.format_map)


LINE = (
    "{case:40s} {shape!s:15s} {op:12s} {implementation:12s} p50 {p50:8.3f} {unit}   {bytes:8d} bytes   "
    "{bytes_an_id:6.2f} an id   {bytes_over_json:5.2f} x JSON   encode + decode {both_over_json:5.2f} x JSON"
)

if __name__ == "__main__":
    main()
