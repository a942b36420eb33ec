"""Bytes and time of a mask on the wire, in every format, against nested JSON.

    python bench/wire.py                    a table
    python bench/wire.py --json             one JSON row a case, format and direction
    python bench/wire.py --rollouts FILE    the masks of a rollout file in place of the recorded ones

The recorded masks (`wire_rollouts.parquet`) are of SmolLM2-135M-Instruct writing prose and code at temperature 1, with
top_k 50 and top_p 0.95, and with top_k 512 and top_p 0.97. Nested JSON is compact, as vLLM's server sends it. Encoding
starts at a `SamplingMask` and ends at bytes; decoding ends at a checked `SamplingMask`. The formats of a case are timed
in turn in one process.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow

import keepmask
from keepmask import SamplingMask
from keepmask.wire import decode_arrow, decode_json, encode_arrow, encode_json, read_rollouts

RECORDED = Path(__file__).with_name("wire_rollouts.parquet")
FORMATS: dict[str, tuple[Callable[[SamplingMask], bytes], Callable[[bytes], SamplingMask]]] = {
    "nested JSON": (encode_json, decode_json),
    "base64": (partial(encode_json, form="base64"), decode_json),
    "arrow": (encode_arrow, decode_arrow),
}
SECONDS, MIN_REPEATS = 0.4, 7


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


def timed(runs: dict[str, Callable[[], object]]) -> dict[str, np.ndarray]:
    """p20, p50 and p80 in ms of each, taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    end = time.perf_counter() + SECONDS * len(runs)
    while time.perf_counter() < end or min(map(len, times.values())) < MIN_REPEATS:
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - begin))
    return {name: np.quantile(values, [0.2, 0.5, 0.8]) for name, values in times.items()}


def measure(case: str, mask: SamplingMask) -> Iterator[dict[str, object]]:
    encoded = {name: encode(mask) for name, (encode, _) in FORMATS.items()}
    assert all(FORMATS[name][1](data) == mask for name, data in encoded.items())
    directions = {
        "encode": timed({name: partial(encode, mask) for name, (encode, _) in FORMATS.items()}),
        "decode": timed({name: partial(FORMATS[name][1], data) for name, data in encoded.items()}),
    }
    for name, data in encoded.items():
        both = {form: sum(directions[way][form][1] for way in directions) for form in FORMATS}
        for way, times in directions.items():
            yield {
                "op": f"wire {way}",
                "case": case,
                "implementation": name,
                "shape": [len(mask), mask.ids.size],
                "dtype": "int32" if mask.logprobs is None else "int32 + float32",
                "unit": "ms",
                **dict(zip(("p20", "p50", "p80"), times[name].tolist(), strict=True)),
                "bytes": len(data),
                "bytes_an_id": len(data) / mask.ids.size,
                "bytes_over_json": len(data) / len(encoded["nested JSON"]),
                "both_over_json": both[name] / both["nested JSON"],
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON row a case, format and direction")
    parser.add_argument("--rollouts", type=Path, default=RECORDED, help="a rollout file to take the masks from")
    args = parser.parse_args()
    machine = {"device": platform.processor() or platform.machine(), "threads": 1}
    versions = {"keepmask": keepmask.__version__, "numpy": np.__version__, "pyarrow": pyarrow.__version__}
    for case, mask in cases(args.rollouts).items():
        for row in measure(case, mask):
            report(row | machine | versions, args.json)


def report(row: dict[str, object], as_json: bool) -> None:
    if as_json:
        rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
        print(json.dumps(rounded), flush=True)
        return
    line = (
        "{case:40s} {shape!s:15s} {op:12s} {implementation:12s} p50 {p50:8.3f} {unit}   {bytes:8d} bytes   "
        "{bytes_an_id:6.2f} an id   {bytes_over_json:5.2f} x JSON   encode + decode {both_over_json:5.2f} x JSON"
    )
    print(line.format(**row), flush=True)


if __name__ == "__main__":
    main()
