"""The examples of docs/format.md, byte for byte. The golden file is made once, by `golden_rollouts` of this module."""

import base64
import json
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from keepmask.mask import SamplingMask
from keepmask.outputs import Rollout, WeightVersionSpan
from keepmask.wire import decode_arrow, decode_json, encode_json, read_rollouts
from keepmask.wire.rollouts import schema

DOCUMENT = (Path(__file__).parents[2] / "docs" / "format.md").read_text("utf-8")
GOLDEN = Path(__file__).parent / "golden" / "rollouts.parquet"
HALF = np.float32(np.log(0.5))
PLAIN = SamplingMask([187, 326, 42], [0, 2, 2, 3])
WITH_LOGPROBS = SamplingMask([187, 326, 42], [0, 2, 2, 3], [HALF, HALF, 0.0])
TEXTS = {1: "a", 42: " lamp", 187: " the", 326: " b"}


def golden_rollouts():
    full = Rollout(
        request_id="7",
        completion_index=1,
        prompt="a",
        prompt_token_ids=np.array([1], np.int32),
        text=" the a lamp",
        token_ids=np.array([187, 1, 42], np.int32),
        logprobs=np.array([HALF, -8.0, 0.0], np.float32),
        sampling_mask=WITH_LOGPROBS,
        sampling_params={"top_p": 0.9, "n": 2},
        seed=2**64 - 1,
        finish_reason="stop",
        stop_reason=42,
        weight_versions=(WeightVersionSpan(0, 2, "s1"), WeightVersionSpan(2, 3, "s2")),
        policy_logprobs=np.array([HALF, -8.0, 0.0], np.float32),
        policy_full_logprobs=np.array([-0.75, -8.0, -0.125], np.float32),
    )
    bare = Rollout(request_id="10", prompt_token_ids=np.array([1], np.int32), token_ids=np.zeros(0, np.int32))
    return [full, bare]


def example(name):
    return re.search(rf"^```\w+ {name}\n(.*?)\n```$", DOCUMENT, re.M | re.S)[1]


@pytest.mark.parametrize(
    ("name", "mask", "form"),
    [
        ("nested", PLAIN, "json"),
        ("nested-logprobs", WITH_LOGPROBS, "json"),
        ("base64", PLAIN, "base64"),
        ("base64-logprobs", WITH_LOGPROBS, "base64"),
    ],
)
def test_json_examples_are_what_is_written_and_read(name, mask, form):
    assert encode_json(mask, form) == example(name).encode()
    assert decode_json(example(name).encode()) == mask


def test_the_compressed_example_is_read():
    assert decode_json(example("base64-zlib").encode()) == PLAIN


def test_the_arrow_example_is_read():
    assert decode_arrow(base64.b64decode(example("arrow"))) == PLAIN


def test_the_golden_rollout_file_is_read():
    rollouts, metadata = read_rollouts(GOLDEN)
    assert rollouts == golden_rollouts()
    assert metadata == {"model": "tiny", "keepmask": "0.1.0", "token_text": TEXTS}


def test_the_golden_rollout_file_has_the_metadata_of_the_document():
    stored = pq.ParquetFile(GOLDEN).metadata.metadata
    assert stored == {b"keepmask": example("rollouts").encode()}


def test_the_document_lists_every_column_in_order():
    table = DOCUMENT.split("| column | type | value |")[1].split("\n\n")[0]
    names = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert names == schema().names


def test_example_metadata_is_json():
    assert json.loads(example("rollouts"))["format"] == 1
