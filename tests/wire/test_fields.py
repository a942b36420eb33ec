import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_masks import CORNERS, masks, peak_bytes

from keepmask.errors import MaskError
from keepmask.mask import SamplingMask
from keepmask.wire.fields import decode_json, encode_json, mask_from_fields, mask_to_fields
from keepmask.wire.limits import Limits

FORMS = ("json", "base64")


@given(masks(), st.sampled_from(FORMS))
def test_decode_inverts_encode(mask, form):
    assert decode_json(encode_json(mask, form)) == mask


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mask", CORNERS.values(), ids=CORNERS)
def test_corner_cases_round_trip(mask, form):
    assert decode_json(encode_json(mask, form)) == mask


def test_default_form_is_the_nested_lists_of_vllm():
    mask = SamplingMask.from_lists([[187, 326], [42]])
    assert mask_to_fields(mask) == {"sampling_mask": [[187, 326], [42]]}
    assert encode_json(mask) == b'{"sampling_mask":[[187,326],[42]]}'


def test_logprobs_have_their_own_field_beside_nested_lists():
    fields = mask_to_fields(SamplingMask.from_lists([[187, 326], [42]], [[-0.5, -1.5], [0.0]]))
    assert fields["sampling_mask_logprobs"] == [[-0.5, -1.5], [0.0]]


@pytest.mark.parametrize("form", FORMS)
def test_a_response_object_gives_its_mask_whichever_form_it_has(form):
    mask = SamplingMask.from_lists([[187, 326], [42]], [[-0.5, -1.5], [0.0]])
    choice = {"index": 0, "token_ids": [326, 42], **mask_to_fields(mask, form)}
    assert mask_from_fields(choice) == mask


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"token_ids": [1]}, "must be an object of base64 strings, got NoneType"),
        ({"sampling_mask": None}, "got NoneType"),
        ({"sampling_mask": {"ids": "", "counts": ""}, "sampling_mask_logprobs": [[]]}, "goes with nested lists"),
    ],
)
def test_a_response_object_without_a_valid_mask_is_refused(fields, message):
    with pytest.raises(MaskError, match=message):
        mask_from_fields(fields)


ATTACKS = {
    "nothing": (b"", "not a JSON text"),
    "not UTF-8": (b'{"sampling_mask":[[\xff]]}', "not a JSON text"),
    "UTF-16": ('{"sampling_mask":[[1]]}'.encode("utf-16"), "not a JSON text"),
    "cut off": (b'{"sampling_mask":[[187,326],[42', "not a JSON text"),
    "two documents": (b'{"sampling_mask":[]}{"sampling_mask":[]}', "not a JSON text"),
    "a list": (b"[[1]]", "a mask is an object"),
    "a string": (b'"sampling_mask"', "a mask is an object"),
    "unknown member": (b'{"sampling_mask":[],"mask":[]}', "unknown member 'mask'"),
    "no mask": (b'{"sampling_mask_logprobs":[]}', "goes with nested lists"),
    "NaN": (b'{"sampling_mask":[[1]],"sampling_mask_logprobs":[[NaN]]}', "NaN is not a number"),
    "-Infinity": (b'{"sampling_mask":[[1]],"sampling_mask_logprobs":[[-Infinity]]}', "-Infinity is not a number"),
    "1e999": (b'{"sampling_mask":[[1]],"sampling_mask_logprobs":[[-1e999]]}', "finite"),
    "a number of 5,000 digits": (b'{"sampling_mask":[[' + b"9" * 5000 + b"]]}", "not a JSON text"),
    "nested too deeply": (b'{"sampling_mask":' + b"[" * 100_000, "nested too deeply"),
    "nested thrice": (b'{"sampling_mask":[[[1]]]}', "ids must be integers"),
    "a float id": (b'{"sampling_mask":[[1.5]]}', "ids must be integers"),
    "an id of 2**31": (b'{"sampling_mask":[[2147483648]]}', "must be in"),
    "more ids than allowed": (b'{"sampling_mask":[[' + b"1," * 300_000 + b"1]]}", "Limits"),
    "more rows than allowed": (b'{"sampling_mask":[' + b"[]," * 20_000 + b"[]]}", "Limits.max_rows"),
    "more bytes than allowed": (b" " * 1_000_001, "Limits.max_bytes"),
}
LIMITS = Limits(max_ids=100_000, max_rows=10_000, max_bytes=1_000_000)


@pytest.mark.parametrize(("data", "message"), ATTACKS.values(), ids=ATTACKS)
def test_attack_is_refused(data, message):
    with pytest.raises(MaskError, match=message):
        decode_json(data, limits=LIMITS)


@pytest.mark.parametrize(
    "data",
    [
        b'{"sampling_mask":[' + b",".join([b"[]"] * 333_000) + b"]}",
        b'{"sampling_mask":[[' + b",".join([b"1000"] * 199_000) + b"]]}",
        b'{"a":[' + b"{}," * 240_000 + b"{}]}",
    ],
    ids=["rows", "ids", "other objects"],
)
def test_refusing_takes_memory_within_the_stated_bound(data):
    def decode():
        with pytest.raises(MaskError):
            decode_json(data, limits=LIMITS)

    assert peak_bytes(decode) < 160 * (LIMITS.max_ids + LIMITS.max_rows) + 2 * len(data)


def test_decoding_at_the_limits_takes_memory_within_the_stated_bound():
    rows = [[10_000 + i for i in range(t % 2, 20)] for t in range(5_000)]
    data = encode_json(SamplingMask.from_lists(rows, [[-0.125] * len(row) for row in rows]))
    limits = Limits(max_ids=sum(map(len, rows)), max_rows=len(rows), max_bytes=len(data))
    assert peak_bytes(lambda: decode_json(data, limits=limits)) < 160 * (limits.max_ids + limits.max_rows) + 2 * len(
        data
    )


@given(st.binary(max_size=80))
def test_any_bytes_make_a_mask_or_a_mask_error(data):
    try:
        decode_json(data)
    except MaskError:
        return
    assert b"sampling_mask" in data


values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=12,
)


@given(values, values)
def test_any_json_values_make_a_mask_or_a_mask_error(rows, logprobs):
    data = json.dumps({"sampling_mask": rows, "sampling_mask_logprobs": logprobs}).encode()
    try:
        mask = decode_json(data)
    except MaskError:
        return
    assert len(mask) == len(rows)
