import base64
import json
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_masks import CORNERS, masks, peak_bytes

from keepmask.errors import MaskError
from keepmask.mask import SamplingMask
from keepmask.wire.limits import Limits
from keepmask.wire.packed import pack, unpack

LIMITS = Limits(max_ids=1000, max_rows=100, max_bytes=10**6)


def b64(data):
    return base64.b64encode(data).decode()


def int32(*values):
    return np.array(values, "<i4").tobytes()


@given(masks())
def test_unpack_inverts_pack(mask):
    assert unpack(pack(mask)) == mask


@pytest.mark.parametrize("mask", CORNERS.values(), ids=CORNERS)
def test_corner_cases_round_trip_through_json(mask):
    assert unpack(json.loads(json.dumps(pack(mask)))) == mask


def test_arrays_are_little_endian():
    assert pack(SamplingMask([1, 258], [0, 2])) == {"ids": b64(b"\1\0\0\0\2\1\0\0"), "counts": b64(b"\2\0\0\0")}


def test_a_large_mask_is_compressed_and_a_small_one_is_not():
    assert pack(CORNERS["wide"])["compression"] == "zlib"
    assert "compression" not in pack(SamplingMask.from_lists([[5, 9]]))


def test_a_reader_with_numpy_and_zlib_alone_gets_the_arrays():
    mask = CORNERS["wide, logprobs"]
    packed = pack(mask)
    ids = np.frombuffer(zlib.decompress(base64.b64decode(packed["ids"])), "<i4")
    counts = np.frombuffer(zlib.decompress(base64.b64decode(packed["counts"])), "<i4")
    logprobs = np.frombuffer(base64.b64decode(packed["logprobs"]), "<f4")
    assert ids.tolist() == mask.ids.tolist()
    assert counts.tolist() == [0, 60_000]
    assert np.array_equal(logprobs, mask.logprobs)


ATTACKS = {
    "not an object": (["AAAA"], "must be an object"),
    "unknown member": ({"ids": "", "counts": "", "offsets": ""}, "unknown member 'offsets'"),
    "no counts": ({"ids": ""}, "counts: must be a base64 string, got NoneType"),
    "no ids": ({"counts": ""}, "ids: must be a base64 string, got NoneType"),
    "a number for a string": ({"ids": 7, "counts": ""}, "ids: must be a base64 string, got int"),
    "null logprobs": ({"ids": "", "counts": "", "logprobs": None}, "logprobs: must be a base64 string"),
    "not base64": ({"ids": "!!!!", "counts": ""}, "ids: not base64"),
    "not ASCII": ({"ids": "ÄÖÜß", "counts": ""}, "ids: not base64"),
    "cut-off base64": ({"ids": "AAA", "counts": ""}, "ids: not base64"),
    "spaces in base64": ({"ids": "AA AA", "counts": ""}, "ids: not base64"),
    "half a number": ({"ids": b64(b"\1\0\0\0\2\0"), "counts": b64(int32(1))}, "6 bytes do not make whole"),
    "truncated ids": ({"ids": b64(int32(1)), "counts": b64(int32(2))}, "add up to 2, but there are 1 ids"),
    "truncated counts": ({"ids": b64(int32(1, 2)), "counts": b64(int32(1))}, "add up to 1, but there are 2 ids"),
    "huge count": ({"ids": b64(int32(1)), "counts": b64(int32(2**31 - 1))}, "add up to 2147483647"),
    "counts that overflow": (
        {"ids": "", "counts": b64(int32(2**31 - 1, 2**31 - 1, 2))},
        "add up to 4294967296, but there are 0",
    ),
    "negative count": ({"ids": b64(int32(1)), "counts": b64(int32(2, -1))}, "counts: must be >= 0, got -1"),
    "negative id": ({"ids": b64(int32(-1)), "counts": b64(int32(1))}, "row 0"),
    "falling row": ({"ids": b64(int32(4, 2)), "counts": b64(int32(2))}, "row 0"),
    "repeated id": ({"ids": b64(int32(4, 4)), "counts": b64(int32(2))}, "row 0"),
    "big-endian counts": (
        {"ids": b64(int32(1, 2)), "counts": b64(np.array([2], ">i4").tobytes())},
        "add up to 33554432",
    ),
    "64-bit ids": (
        {"ids": b64(np.array([1, 2], "<i8").tobytes()), "counts": b64(int32(2))},
        "add up to 2, but there are 4",
    ),
    "too few logprobs": ({"ids": b64(int32(1, 2)), "counts": b64(int32(2)), "logprobs": b64(int32(0))}, "logprob"),
    "NaN logprob": (
        {"ids": b64(int32(1)), "counts": b64(int32(1)), "logprobs": b64(np.array([np.nan], "<f4").tobytes())},
        "finite",
    ),
    "too many ids": ({"ids": b64(bytes(4004)), "counts": b64(int32(1001))}, "more than the 1000 values"),
    "too many rows": ({"ids": "", "counts": b64(bytes(404))}, "more than the 100 values"),
    "too many bytes": ({"ids": "A" * 10**6 + "AAAA", "counts": ""}, "Limits.max_bytes"),
    "unknown compression": ({"ids": "", "counts": "", "compression": "gzip"}, "must be 'zlib' or absent"),
    "compression that is no string": ({"ids": "", "counts": "", "compression": 1}, "must be 'zlib' or absent"),
    "not zlib": ({"ids": b64(b"abcd"), "counts": b64(b"abcd"), "compression": "zlib"}, "not zlib"),
    "cut-off zlib": (
        {"ids": b64(zlib.compress(int32(1))[:-3]), "counts": b64(zlib.compress(int32(1))), "compression": "zlib"},
        "ids: the zlib stream is cut off",
    ),
    "bytes after zlib": (
        {"ids": b64(zlib.compress(int32(1)) + b"x"), "counts": b64(zlib.compress(int32(1))), "compression": "zlib"},
        "followed by other bytes",
    ),
}


@pytest.mark.parametrize(("packed", "message"), ATTACKS.values(), ids=ATTACKS)
def test_attack_is_refused(packed, message):
    with pytest.raises(MaskError, match=message):
        unpack(packed, limits=LIMITS)


def test_a_decompression_bomb_is_refused_without_inflating_it():
    bomb = b64(zlib.compress(bytes(200_000_000), 9))
    packed = {"ids": bomb, "counts": b64(zlib.compress(int32(1))), "compression": "zlib"}

    def explode():
        with pytest.raises(MaskError, match="inflates beyond the 1000 values"):
            unpack(packed, limits=LIMITS)

    assert peak_bytes(explode) < 2_000_000


@given(st.dictionaries(st.sampled_from(["ids", "counts", "logprobs", "compression"]), st.one_of(
    st.text(max_size=20), st.binary(max_size=40).map(b64), st.binary(max_size=40).map(zlib.compress).map(b64),
    st.just("zlib"), st.none(), st.integers(),
)))  # fmt: skip
def test_any_object_makes_a_mask_or_a_mask_error(packed):
    try:
        mask = unpack(packed, limits=LIMITS)
    except MaskError:
        return
    assert SamplingMask(mask.ids, mask.offsets, mask.logprobs) == mask
