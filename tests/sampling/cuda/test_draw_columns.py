"""The columns the device kernels read, row by row."""

import numpy as np
from sampler_rows import masks, open_row

from keepmask.sampling import Sampler, SamplerSpec
from keepmask.sampling.cuda.draw_columns import draw_columns
from keepmask.sampling.cuda.draw_table import COLUMNS, VLLM
from keepmask.sampling.row_records import RowRecords


def columns_of(spec, params, items, source):
    sampler = Sampler(spec)
    rows = [open_row(sampler, seed=i, completion_index=i, output=[1] * i, **given) for i, given in enumerate(params)]
    return draw_columns(RowRecords(spec).of(rows), spec, np.asarray(items), np.asarray(source))


def test_every_column_is_there_for_the_chosen_rows_in_their_order():
    params = [{"top_k": 3, "temperature": 0.7}, {"top_p": 0.5}, {"temperature": 0.0}, {"min_p": 0.25}]
    columns = columns_of(masks(9), params, [3, 0, 2], [5, 1, 0])
    assert set(columns) >= set(COLUMNS)
    assert columns["source"].tolist() == [5, 1, 0]
    assert columns["seed"].tolist() == columns["position"].tolist() == columns["completion"].tolist() == [3, 0, 2]
    assert columns["temperature"].tolist() == [1.0, np.float32(0.7), 1.0]
    assert columns["select_k"].tolist() == [0, 3, 1]
    assert columns["log_min_p"].tolist() == [np.log(0.25), -np.inf, -np.inf]
    assert columns["greedy"].tolist() == [False, False, True]
    assert columns["profile"].tolist() == [VLLM] * 3
    assert not columns["whole"].any()


def test_only_rows_that_return_masks_have_slots():
    params = [
        {"return_sampling_mask": False},
        {},
        {"return_sampling_mask_logprobs": True},
        {"return_sampling_mask_logprobs": True},
    ]
    columns = columns_of(masks(9), params, range(4), range(4))
    assert columns["mask_slot"].tolist() == [-1, 0, 1, 2]
    assert columns["logprobs_slot"].tolist() == [-1, -1, 0, 1]


def test_an_unfiltered_row_is_weighed_only_where_log_probs_of_its_support_are_wanted():
    params = [{}, {"logprobs": 0}, {"top_p": 0.5}]
    assert columns_of(masks(9), params, range(3), range(3))["weighs"].tolist() == [False, True, True]
    raw = SamplerSpec(vocab_size=9)
    assert columns_of(raw, params, range(3), range(3))["weighs"].tolist() == [False, False, True]
