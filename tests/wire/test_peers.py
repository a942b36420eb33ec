"""Other programs' layouts, with payloads as those programs write them."""

import base64
import contextlib
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepmask import MaskError, SamplingMask
from keepmask.wire import peers
from keepmask.wire.limits import Limits

ROWS = [[187, 326], [42], [5, 9, 11]]
LOGPROBS = [[math.log(0.25), math.log(0.75)], [0.0], [math.log(0.5), math.log(0.25), math.log(0.25)]]
MASK = SamplingMask.from_lists(ROWS)
MASK_WITH_LOGPROBS = SamplingMask.from_lists(ROWS, LOGPROBS)

rows_of_ids = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=6, unique=True), max_size=8)


def b64_int32(values):
    return base64.b64encode(np.asarray(values, "<i4").tobytes()).decode()


# --- vLLM


def test_vllm_nested_lists_give_their_rows():
    assert peers.from_vllm(json.loads("[[187, 326], [42], [5, 9, 11]]")) == MASK


def test_vllm_csr_gives_the_same_rows_as_a_mapping_and_as_an_object():
    csr = {"token_ids": [187, 326, 42, 5, 9, 11], "offsets": [0, 2, 3, 6]}
    assert peers.from_vllm(csr) == MASK
    assert peers.from_vllm(SimpleNamespace(**csr)) == MASK
    assert peers.from_vllm(SimpleNamespace(token_ids=ROWS)) == MASK  # vllm.outputs.SamplingMask
    assert peers.from_vllm(SimpleNamespace(token_ids=ROWS, logprobs=LOGPROBS)) == MASK_WITH_LOGPROBS


def test_vllm_mask_logprobs_follow_their_ids():
    shuffled = [[326, 187], [42], [11, 5, 9]]
    logprobs = [LOGPROBS[0][::-1], [0.0], [LOGPROBS[2][2], LOGPROBS[2][0], LOGPROBS[2][1]]]
    assert peers.from_vllm(shuffled, logprobs) == MASK_WITH_LOGPROBS


@pytest.mark.parametrize(
    ("sampling_mask", "message"),
    [
        (None, "sampling_mask: .*--return-sampling-mask"),
        ("[[1]]", "sampling_mask: must be one list"),
        ([[1], 2], "sampling_mask: each row must be a list, got 2"),
        ([[1], "2"], "sampling_mask: each row must be a list, got '2'"),
        ([[1, 1]], "sampling_mask: .*row 0"),
        ([[0, 5, 0, 0]], "sampling_mask: .*row 0"),  # padded with zeros next to a real id 0
        ([[-1, 3]], "sampling_mask: .*row 0"),
        ([[1.5]], "sampling_mask: ids must be integers, got 1.5"),
        ([[True]], "sampling_mask: ids must be integers, got True"),
        ([[[1]]], "sampling_mask: ids must be integers"),
        ([[1, [2]]], "sampling_mask: "),
        ([[2**40]], "sampling_mask: "),
        ([[2**70]], "sampling_mask: "),
        ({"ids": [1]}, "sampling_mask: needs token_ids, got fields"),
        ({"token_ids": [1, 2], "offsets": [0, 1]}, r"offsets: .*number of ids, 2; got \[0, 1\]"),
        ({"token_ids": [1, 2], "offsets": [0, 3, 2]}, "offsets: .*not decrease"),
        ({"token_ids": [1, 2], "offsets": []}, "offsets: "),
        ({"token_ids": [[1], [2]], "offsets": [0, 1, 2]}, "ids: must have 1 dimension"),
    ],
)
def test_a_malformed_vllm_mask_is_refused_by_name(sampling_mask, message):
    with pytest.raises(MaskError, match=message):
        peers.from_vllm(sampling_mask)


@pytest.mark.parametrize("logprobs", [[[0.0]], [[0.0], [0.0, 0.0], [0.0]], [["x"], [0.0], [0.0]], 3])
def test_logprobs_of_another_shape_than_the_ids_are_refused(logprobs):
    with pytest.raises(MaskError):
        peers.from_vllm([[1], [2], [3]], logprobs)


def test_logprobs_that_are_not_over_the_support_are_refused():
    with pytest.raises(MaskError, match=r"probabilities of row 0 add up to 0\.5"):
        peers.from_vllm([[1, 2]], [[math.log(0.25), math.log(0.25)]])
    with pytest.raises(MaskError, match="logprobs: must be finite"):
        peers.from_vllm([[1, 2]], [[math.nan, 0.0]])


def vllm_answer(**choice):
    return {
        "request_id": "gen-1",
        "prompt_token_ids": [7, 8],
        "choices": [
            {
                "index": 0,
                "token_ids": [326, 42, 9],
                "sampling_mask": ROWS,
                "logprobs": {
                    "content": [
                        {"token_id": t, "logprob": p, "rank": 1, "top_logprobs": []}
                        for t, p in [(326, -0.25), (42, 0.0), (9, -1.5)]
                    ]
                },
                "finish_reason": "stop",
                "stop_reason": 9,
                "weight_versions": [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}],
            }
            | choice
        ],
    }


def test_a_vllm_answer_becomes_a_rollout():
    (rollout,) = peers.rollouts_from_vllm(vllm_answer(), sampling_params={"temperature": 0.7})
    assert rollout.prompt_token_ids.tolist() == [7, 8]
    assert rollout.token_ids.tolist() == [326, 42, 9]
    assert rollout.sampling_mask == MASK
    assert rollout.logprobs.tolist() == [-0.25, 0.0, -1.5]
    assert rollout.logprobs.dtype == np.float32
    assert rollout.sampling_params == {"temperature": 0.7}
    assert rollout.weight_versions == ((0, 2, "3"), (2, 3, "4"))
    assert (rollout.request_id, rollout.finish_reason, rollout.stop_reason) == ("gen-1", "stop", 9)


def test_a_vllm_answer_with_token_strings_and_mask_logprobs_becomes_a_rollout():
    content = [{"token": f"token_id:{t}", "logprob": -1.0} for t in (326, 42, 9)]
    (rollout,) = peers.rollouts_from_vllm(
        vllm_answer(logprobs={"content": content}, sampling_mask_logprobs=LOGPROBS), prompt_token_ids=[1, 2, 3]
    )
    assert rollout.sampling_mask == MASK_WITH_LOGPROBS
    assert rollout.prompt_token_ids.tolist() == [1, 2, 3]


def test_decoded_token_text_names_no_id():
    content = [{"token": "5", "logprob": -1.0}] * 3
    (rollout,) = peers.rollouts_from_vllm(vllm_answer(logprobs={"content": content}))
    assert rollout.logprobs.tolist() == [-1.0] * 3


def test_a_vllm_choice_without_mask_or_logprobs_stays_without():
    (rollout,) = peers.rollouts_from_vllm(vllm_answer(sampling_mask=None, logprobs=None))
    assert rollout.sampling_mask is None
    assert rollout.logprobs is None


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"token_ids": None}, r"choices\[0\].token_ids: absent"),
        ({"token_ids": ["a"]}, r"choices\[0\].token_ids: must hold int32"),
        ({"logprobs": {"content": [{"logprob": -1.0}]}}, r"choices\[0\].logprobs: 1 entries for 3 tokens"),
        ({"logprobs": {"content": [{"token_id": 5, "logprob": -1.0}] * 3}}, "position 0 is of token '5', not 326"),
        ({"logprobs": {"content": [{"token": "token_id:5", "logprob": -1.0}] * 3}}, "position 0 is of token '5'"),
        ({"logprobs": {"content": [{"logprob": None}] * 3}}, r"choices\[0\].logprobs: "),
        ({"logprobs": {"content": [None] * 3}}, r"choices\[0\].logprobs: must be an object"),
        ({"logprobs": [-1.0] * 3}, r"choices\[0\].logprobs: must be an object"),
        ({"token_ids": [-5, 1, 2]}, r"choices\[0\].token_ids: token ids must be in"),
        ({"finish_reason": "cosmic ray"}, "finish_reason='cosmic ray'"),
        ({"weight_versions": [{"version": "3"}]}, r"weight_versions\[0\].start: must be an integer"),
    ],
)
def test_a_malformed_vllm_answer_is_refused_by_field(choice, message):
    with pytest.raises(MaskError, match=message):
        peers.rollouts_from_vllm(vllm_answer(**choice))


def test_a_vllm_answer_read_by_the_renderers_client_gives_the_same_mask():
    client = pytest.importorskip("renderers.client")
    choice = client.parse_generate_response(json.dumps(vllm_answer()).encode())["choices"][0]
    assert peers.from_vllm(choice["sampling_mask"]) == MASK


# --- SGLang


def sglang_meta(**changes):
    return {
        "id": "rid",
        "finish_reason": {"type": "stop", "matched": 9},
        "output_token_sampling_mask": [[326, 187], [42], [5, 11, 9]],  # by weight, not by id
        "output_token_sampling_logprobs": [-0.25, 0.0, -1.5],
        "output_token_sampling_mask_length": 3,
    } | changes


def test_sglang_rows_sorted_by_weight_give_the_mask():
    assert peers.from_sglang(sglang_meta()) == MASK


def test_sglang_support_logprobs_follow_their_ids():
    rows = [LOGPROBS[0][::-1], [0.0], [LOGPROBS[2][0], LOGPROBS[2][2], LOGPROBS[2][1]]]
    expected = peers.from_vllm([[326, 187], [42], [5, 11, 9]], rows)
    assert expected == MASK_WITH_LOGPROBS
    assert peers.from_sglang(sglang_meta(output_token_sampling_logprobs=rows)) == expected
    assert peers.from_sglang(sglang_meta(output_token_sampling_mask_logprobs=rows)) == expected


def test_an_sglang_answer_becomes_a_rollout_in_either_logprobs_mode():
    answer = {"text": "x", "output_ids": [326, 42, 9], "meta_info": sglang_meta()}
    (rollout,) = peers.rollouts_from_sglang(answer, prompt_token_ids=[1], sampling_params={"top_p": 0.9})
    assert rollout.logprobs.tolist() == [-0.25, 0.0, -1.5]
    assert (rollout.finish_reason, rollout.stop_reason) == ("stop", 9)
    rows = [LOGPROBS[0][::-1], [0.0], [LOGPROBS[2][0], LOGPROBS[2][2], LOGPROBS[2][1]]]
    answer["meta_info"] = sglang_meta(output_token_sampling_logprobs=rows)
    (rollout,) = peers.rollouts_from_sglang(answer, prompt_token_ids=[1])
    np.testing.assert_allclose(rollout.logprobs, np.log([0.75, 1, 0.25]), atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_token_sampling_mask": None}, "output_token_sampling_mask: absent"),
        (
            {"output_token_sampling_mask_truncated": [False, True, True]},
            "output_token_sampling_mask_truncated: 2 rows, the first at position 1; a cut support cannot be replayed",
        ),
        ({"output_token_sampling_mask": [[326], [], [9]]}, "output_token_sampling_mask: row 1 is empty"),
        ({"output_token_sampling_mask_length": 7}, "output_token_sampling_mask_length: 7, but there are 3 rows"),
        (
            {"output_token_sampling_logprobs": [[0.0]] * 2},
            "output_token_sampling_mask_logprobs: needs one value for each id",
        ),
    ],
)
def test_bounded_streamed_or_missing_sglang_masks_are_refused_by_name(changes, message):
    with pytest.raises(MaskError, match=message):
        peers.from_sglang(sglang_meta(**changes))


def test_an_sglang_mask_whose_truncation_flags_are_all_false_is_taken():
    assert peers.from_sglang(sglang_meta(output_token_sampling_mask_truncated=[False] * 3)) == MASK


def test_sglang_repetition_penalty_is_refused_since_it_is_not_vllms():
    answer = {"output_ids": [326, 42, 9], "meta_info": sglang_meta()}
    with pytest.raises(MaskError, match=r"repetition_penalty=1\.2: SGLang's counts the output only"):
        peers.rollouts_from_sglang(answer, prompt_token_ids=[1], sampling_params={"repetition_penalty": 1.2})


# --- verifiers, prime-rl


def test_verifiers_arrays_and_their_msgpack_form_give_the_mask():
    ids, counts = np.array([187, 326, 42, 5, 9, 11], np.int32), np.array([2, 1, 3], np.int32)
    assert peers.from_verifiers(SimpleNamespace(ids=ids, counts=counts)) == MASK
    dumped = {  # MessageNode.model_dump(mode="python")["sampling_mask"] of verifiers 0.4.0
        "ids": {
            "__nd__": True,
            "dtype": "int32",
            "shape": [6],
            "data": b"\xbb\x00\x00\x00F\x01\x00\x00*\x00\x00\x00\x05\x00\x00\x00\t\x00\x00\x00\x0b\x00\x00\x00",
        },
        "counts": {
            "__nd__": True,
            "dtype": "int32",
            "shape": [3],
            "data": b"\x02\x00\x00\x00\x01\x00\x00\x00\x03\x00\x00\x00",
        },
    }
    assert peers.from_verifiers(dumped) == MASK


def test_the_published_verifiers_package_writes_what_is_read():
    graph, trace = pytest.importorskip("verifiers.v1.graph"), pytest.importorskip("verifiers.v1.trace")
    types = pytest.importorskip("verifiers.v1.types")

    def node(role, token_ids, mask, rows):
        return graph.MessageNode(
            message=role(content="x"),
            token_ids=token_ids,
            mask=mask,
            sampling_mask=types.SamplingMask.from_sampling_mask(rows) if rows else None,
        )

    nodes = [
        node(types.AssistantMessage, [1, 2, 326, 42], [False, False, True, True], ROWS[:2]),
        node(types.UserMessage, [50, 51], [False, False], None),
        node(types.AssistantMessage, [7, 9], [False, True], ROWS[2:]),
    ]
    branch = trace.Branch(index=0, nodes=nodes)
    assert peers.from_verifiers(branch.sampling_mask, sampled=branch.sampled_mask) == MASK
    assert peers.from_verifiers(nodes[0].model_dump(mode="python")["sampling_mask"]) == MASK[:2]
    assert peers.from_verifiers(types.SamplingMask(**peers.to_ids_counts(MASK))) == MASK


def test_a_verifiers_branch_gives_the_rows_of_its_sampled_tokens():
    branch = SimpleNamespace(ids=np.array([187, 326, 42, 5, 9, 11]), counts=np.array([0, 2, 1, 0, 0, 3, 0]))
    sampled = [False, True, True, False, False, True, False]
    assert peers.from_verifiers(branch, sampled=sampled) == MASK
    with pytest.raises(MaskError, match=r"counts: row 5 holds ids, but its token was not sampled"):
        peers.from_verifiers(branch, sampled=[False, True, True, False, False, False, False])
    with pytest.raises(MaskError, match="sampled: "):
        peers.from_verifiers(branch, sampled=[True])


def test_prime_rl_bytes_give_the_mask_with_logprobs():
    struct = SimpleNamespace(
        ids=np.concatenate(ROWS).astype("<i4").tobytes(),
        counts=np.array([2, 1, 3], "<i4").tobytes(),
        logprobs=np.concatenate(LOGPROBS).astype("<f4").tobytes(),
    )
    assert peers.from_verifiers(struct) == MASK_WITH_LOGPROBS


def test_a_whole_vocabulary_row_is_a_count_of_zero():
    mask = peers.from_ids_counts([3, 1], [0, 2, 0])
    assert [mask.row(0), mask.row(1).tolist(), mask.row(2)] == [None, [1, 3], None]


@pytest.mark.parametrize(
    ("ids", "counts", "message"),
    [
        ([1, 2], None, "counts: absent; ids and counts belong together"),
        (None, [1], "ids: absent"),
        ([1, 2], [1], "counts: add up to 1, but there are 2 ids"),
        ([1, 2], [2**31 - 1] * 2, "counts: add up to 4294967294, but there are 2 ids"),
        ([1, 2], [-1, 3], "counts: must be >= 0; negative at row 0"),
        (b"\x01\x00\x00", [1], "ids: 3 bytes are not a flat array of int32"),
        ([1.0], [1], "ids: must hold int32, got float64"),
        ([[1], [2, 3]], [1], "ids: "),
        ({"data": b"", "dtype": "int32"}, [1], "ids: a packed array has data, shape and dtype"),
        ({"data": b"", "shape": [1], "dtype": "object"}, [1], "ids: dtype 'object'"),
        ({"data": b"", "shape": [2**40], "dtype": "int32"}, [1], "ids: 0 bytes for int32 of shape"),
        ({"data": b"", "shape": [-1], "dtype": "int32"}, [1], "ids: shape"),
        ({"data": "!", "shape": [1], "dtype": "int32"}, [1], "ids: not base64"),
        ({"data": 5, "shape": [1], "dtype": "int32"}, [1], "ids: packed data"),
    ],
)
def test_malformed_ids_and_counts_are_refused_by_name(ids, counts, message):
    with pytest.raises(MaskError, match=message):
        peers.from_ids_counts(ids, counts)


# --- slime, miles


def test_a_slime_sample_gives_its_mask_as_lists_and_as_tensors():
    ids, offsets = [187, 326, 42, 5, 9, 11], [0, 2, 3, 6]
    sample = SimpleNamespace(rollout_top_p_token_ids=ids, rollout_top_p_token_offsets=offsets)
    assert peers.from_slime(sample) == MASK
    tensors = {"rollout_top_p_token_ids": torch.tensor(ids), "rollout_top_p_token_offsets": torch.tensor(offsets)}
    assert peers.from_slime(tensors) == MASK


def test_slime_metadata_in_base64_gives_the_mask():
    meta = {"top_p_token_ids": b64_int32([187, 326, 42, 5, 9, 11]), "top_p_token_offsets": b64_int32([0, 2, 3, 6])}
    assert peers.from_slime(meta) == MASK


def test_only_one_of_slimes_arrays_is_refused():
    with pytest.raises(MaskError, match="rollout_top_p_token_offsets: absent"):
        peers.from_slime({"rollout_top_p_token_ids": [1]})
    with pytest.raises(MaskError, match="this sample carries no mask"):
        peers.from_slime({})


def test_miles_arrays_with_support_logprobs_give_the_mask():
    ids, offsets = torch.tensor([187, 326, 42, 5, 9, 11], dtype=torch.int32), torch.tensor([0, 2, 3, 6])
    logprobs = torch.tensor(np.concatenate(LOGPROBS), dtype=torch.float32)
    assert peers.from_ids_offsets(ids, offsets, logprobs) == MASK_WITH_LOGPROBS
    with pytest.raises(MaskError, match="logprobs: 5 values for 6 ids"):
        peers.from_ids_offsets(ids, offsets, logprobs[:5])


# --- SkyRL

SKYRL = np.array([[326, 187, -1], [42, -1, -1], [9, 5, 11]], np.int32)  # the sampled id first, -1 last


def test_skyrl_rows_and_their_envelope_give_the_mask():
    assert peers.from_skyrl(SKYRL) == MASK
    envelope = {"data": base64.b64encode(SKYRL.tobytes()).decode(), "shape": [3, 3], "dtype": "int32"}
    assert peers.from_skyrl(envelope) == MASK
    assert peers.from_skyrl(envelope | {"data": memoryview(envelope["data"].encode())}) == MASK
    assert peers.from_skyrl(torch.tensor(SKYRL)) == MASK


def test_skyrl_padding_never_hides_a_real_id_zero():
    assert peers.from_skyrl(np.array([[7, 0, -1, -1]], np.int32)).row(0).tolist() == [0, 7]


def test_skyrl_logprobs_follow_their_ids():
    logprobs = np.log(np.array([[0.75, 0.25, 0.5], [1, 0.5, 0.5], [0.25, 0.5, 0.25]], np.float32))
    assert peers.from_skyrl(SKYRL, logprobs) == MASK_WITH_LOGPROBS


def test_skyrl_packed_fields_give_one_mask_a_trajectory():
    masks = peers.from_skyrl_packed(SKYRL, np.array([0, 1, 1, 3], np.int32))
    assert masks == [MASK[:1], MASK[1:1], MASK[1:]]
    ragged = peers.from_skyrl_packed([326, 187, 42, 9, 5, 11], [0, 2, 3], row_offsets=[0, 2, 3, 6])
    assert ragged == [MASK[:2], MASK[2:]]


def test_skyrl_rows_of_padding_alone_are_refused_inside_the_loss():
    rows = np.array([[5, 9], [-1, -1], [7, -1]], np.int32)
    with pytest.raises(MaskError, match=r"row 1 is nothing but padding \(1 such rows in the loss\)"):
        peers.from_skyrl(rows)
    assert peers.from_skyrl(rows, loss_mask=[1, 0, 1]) == SamplingMask.from_lists([[5, 9], [7]])
    assert peers.from_skyrl(rows, loss_mask=[False, False, True]) == SamplingMask.from_lists([[7]])
    first, second = peers.from_skyrl_packed(rows, [0, 2, 3], loss_mask=np.array([1, 0, 1]))
    assert (first, second) == (SamplingMask.from_lists([[5, 9]]), SamplingMask.from_lists([[7]]))
    with pytest.raises(MaskError, match="row 1 is nothing but padding"):
        peers.from_skyrl_packed([5, 9, 7], [0, 3], row_offsets=[0, 2, 2, 3])
    with pytest.raises(MaskError, match=r"loss_mask: \[2\] flags for 3 rows"):
        peers.from_skyrl(rows, loss_mask=[1, 1])
    with pytest.raises(MaskError, match="row 0: the whole vocabulary has no form in SkyRL's layout"):
        peers.to_skyrl(SamplingMask.from_lists([[], [1]]))


UNSIGNED = (np.uint8, np.uint16, np.uint32, np.uint64)


@pytest.mark.parametrize("dtype", UNSIGNED)
def test_bounds_that_fall_are_refused_in_unsigned_types_too(dtype):
    falling = np.array([0, 3, 1, 5], dtype)
    with pytest.raises(MaskError, match="cu_seqlens: must start at 0, not decrease"):
        peers.from_skyrl_packed([1, 2, 3, 4, 5], falling, row_offsets=np.arange(6, dtype=dtype))
    with pytest.raises(MaskError, match="offsets: must start at 0, not decrease"):
        peers.from_ids_offsets([1, 2, 3, 4, 5], falling)
    with pytest.raises(MaskError, match="offsets: must not decrease"):
        SamplingMask([1, 2, 3, 4, 5], falling)
    counts = peers.from_ids_counts(np.array([1, 2, 3], dtype), np.array([2, 1], dtype))
    assert counts == SamplingMask.from_lists([[1, 2], [3]])


WILD = (
    [0, 2**70], [0, 2**64 - 1], np.array([0, 2**64 - 1], np.uint64), [[0, 2**70]], [10**400],
    {"data": "", "shape": [2**31, 0], "dtype": "int32"}, {"data": "", "shape": [2**31 - 1, 0], "dtype": "int32"},
    {"data": "", "shape": [2**70, 0], "dtype": "int32"},
)  # fmt: skip


@pytest.mark.parametrize("wild", WILD, ids=lambda value: str(value)[:30])
@pytest.mark.parametrize(
    "read",
    [
        lambda v: peers.from_ids_offsets([1], v),
        lambda v: peers.from_ids_offsets(v, [0, 2]),
        lambda v: peers.from_ids_counts([1], v),
        lambda v: peers.from_ids_counts([1], [1], v),
        lambda v: peers.from_vllm(v),
        lambda v: peers.from_sglang({"output_token_sampling_mask": [[1]], "output_token_sampling_mask_length": v}),
        lambda v: peers.from_skyrl(v),
        lambda v: peers.from_skyrl_packed([1], v, [0, 1]),
        lambda v: peers.rollouts_from_flat(v, [1, 1]),
        lambda v: peers.rollouts_from_vllm({"prompt_token_ids": [1], "choices": [{"token_ids": [1], "index": v}]}),
        lambda v: peers.rollouts_from_vllm(
            {"prompt_token_ids": [1], "choices": [{"token_ids": [1], "weight_versions": [{"start": v, "end": 1}]}]}
        ),
    ],
)
def test_numbers_and_shapes_beyond_any_integer_type_are_mask_errors(read, wild):
    with pytest.raises(MaskError):
        read(wild)


def test_rows_are_bounded_in_every_layout():
    few = Limits(max_rows=2)
    for read in (
        lambda: peers.from_ids_offsets([1, 2, 3], [0, 1, 2, 3], limits=few),
        lambda: peers.from_ids_counts([1, 2, 3], [1, 1, 1], limits=few),
        lambda: peers.from_slime({"top_p_token_ids": [1, 2, 3], "top_p_token_offsets": [0, 1, 2, 3]}, limits=few),
        lambda: peers.from_skyrl([[1], [2], [3]], limits=few),
        lambda: peers.from_skyrl({"data": "", "shape": [3, 0], "dtype": "int32"}, limits=few),
        lambda: peers.from_vllm([[1], [2], [3]], limits=few),
        lambda: peers.from_vllm({"token_ids": [1, 2, 3], "offsets": [0, 1, 2, 3]}, limits=few),
    ):
        with pytest.raises(MaskError, match="mask of 3 rows: at most 2"):
            read()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: peers.from_skyrl(np.array([[1, -1, 2]])), "padding must come last in a row; it does not in row 0"),
        (lambda: peers.from_skyrl(np.array([[1, -2]])), "row 0"),
        (lambda: peers.from_skyrl(np.array([1, 2])), "must have 2 dimensions"),
        (lambda: peers.from_skyrl(SKYRL, np.zeros((3, 2), np.float32)), "rollout_sample_support_logprobs: shape"),
        (lambda: peers.from_skyrl_packed(SKYRL, [0, 2]), "cu_seqlens: .*number of rows, 3"),
        (lambda: peers.to_skyrl(MASK, 2), "top_k=2: the widest row holds 3 ids"),
    ],
)
def test_malformed_skyrl_arrays_are_refused_by_name(call, message):
    with pytest.raises(MaskError, match=message):
        call()


# --- all of them


@given(rows_of_ids)
def test_every_layout_round_trips(rows):
    mask = SamplingMask.from_lists(rows)
    assert peers.from_vllm(mask.token_ids) == mask
    assert peers.from_ids_counts(**peers.to_ids_counts(mask)) == mask
    assert peers.from_slime(peers.to_slime(mask)) == mask
    if mask.counts.all():
        assert peers.from_skyrl(peers.to_skyrl(mask)) == mask


@given(st.recursive(st.none() | st.integers() | st.floats() | st.text() | st.binary(), st.lists, max_leaves=20))
def test_any_value_gives_a_mask_or_a_mask_error(value):
    for read in (
        peers.from_vllm,
        peers.from_skyrl,
        lambda v: peers.from_sglang({"output_token_sampling_mask": v}),
        lambda v: peers.from_ids_counts(v, v),
        lambda v: peers.from_slime({"top_p_token_ids": v, "top_p_token_offsets": v}),
    ):
        with contextlib.suppress(MaskError):
            assert isinstance(read(value), SamplingMask)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.floats(-2, 2) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["logprob", "start", "content"]), inner)
    ),
    max_leaves=6,
)


@given(st.sampled_from(sorted(vllm_answer()["choices"][0])), json_values)
def test_any_value_in_a_vllm_answer_gives_rollouts_or_a_mask_error(name, value):
    with contextlib.suppress(MaskError):
        assert len(peers.rollouts_from_vllm(vllm_answer(**{name: value}))) == 1
    with contextlib.suppress(MaskError):
        peers.rollouts_from_vllm({"choices": value, "prompt_token_ids": [1]})


@given(st.sampled_from([*sglang_meta(), "output_token_sampling_mask_truncated", "weight_versions"]), json_values)
def test_any_value_in_an_sglang_answer_gives_a_rollout_or_a_mask_error(name, value):
    answer = {"output_ids": [326, 42, 9], "meta_info": sglang_meta(**{name: value})}
    with contextlib.suppress(MaskError):
        assert len(peers.rollouts_from_sglang(answer, prompt_token_ids=[1])) == 1


def test_masks_over_the_memory_bound_are_refused_before_they_are_built():
    wide = list(range(1000))
    for read in (
        lambda: peers.from_vllm([wide], limits=Limits(max_ids=999)),
        lambda: peers.from_ids_counts(wide, [1000], limits=Limits(max_ids=999)),
        lambda: peers.from_slime(peers.to_slime(SamplingMask.from_lists([wide])), limits=Limits(max_ids=999)),
        lambda: peers.from_skyrl([wide], limits=Limits(max_ids=999)),
        lambda: peers.from_ids_counts(
            {"__nd__": True, "data": bytes(8000), "shape": [2000], "dtype": "int32"}, [], limits=Limits(max_ids=999)
        ),
    ):
        with pytest.raises(MaskError, match="at most 999 are decoded"):
            read()
    assert len(peers.from_vllm([wide], limits=Limits(max_ids=1000))) == 1


def test_a_flat_sequence_falls_into_turns_at_its_sampled_runs():
    turns = peers.rollouts_from_flat(
        [1, 2, 326, 42, 50, 51, 9],
        [0, 0, 1, 1, 0, 0, 1],
        MASK,
        logprobs=[-0.25, 0.0, -1.5],
        sampling_params={"temperature": 1.0},
    )
    assert [turn.prompt_token_ids.tolist() for turn in turns] == [[1, 2], [1, 2, 326, 42, 50, 51]]
    assert [turn.token_ids.tolist() for turn in turns] == [[326, 42], [9]]
    assert [turn.sampling_mask for turn in turns] == [MASK[:2], MASK[2:]]
    assert [turn.logprobs.tolist() for turn in turns] == [[-0.25, 0.0], [-1.5]]
    with pytest.raises(MaskError, match="mask: 3 rows for 2 sampled tokens"):
        peers.rollouts_from_flat([1, 2, 3], [0, 1, 1], MASK)
    with pytest.raises(MaskError, match="sampled: "):
        peers.rollouts_from_flat([1, 2, 3], [0, 1])
