"""The records that the kernels read, row by row, and their words."""

import numpy as np
import torch
from sampler_rows import masks, open_row

from keepmask.sampling import Sampler
from keepmask.sampling.cuda.draw_records import column, words_of
from keepmask.sampling.records import OFF_K, RECORD
from keepmask.sampling.row_records import PROFILES, RowRecords


def rows_of(spec, params):
    sampler = Sampler(spec)
    return [open_row(sampler, seed=i, completion_index=i, output=[1] * i, **given) for i, given in enumerate(params)]


def test_every_parameter_is_there_and_what_it_bounds():
    params = [{"top_k": 3, "temperature": 0.7}, {"top_p": 0.5}, {"temperature": 0.0}, {"min_p": 0.25}, {}]
    records = RowRecords(masks(9)).of(rows_of(masks(9), params))
    assert records["source"].tolist() == records["seed"].tolist() == records["position"].tolist() == [0, 1, 2, 3, 4]
    assert records["completion"].tolist() == [0, 1, 2, 3, 4]
    assert records["temperature"].tolist() == [np.float32(0.7), 1, 1, 1, 1]
    assert records["top_k"].tolist() == [3, OFF_K, OFF_K, OFF_K, OFF_K]
    assert records["select_k"].tolist() == [3, 0, 1, 0, 0]
    assert records["log_min_p"].tolist() == [-np.inf, -np.inf, -np.inf, np.log(0.25), -np.inf]
    assert records["select_log_min_p"].tolist() == records["log_min_p"].tolist()
    assert records["select_top_p"].tolist() == [1, 0.5, 1, 1, 1]
    assert records["greedy"].tolist() == [0, 0, 1, 0, 0]
    assert records["by_rank"].tolist() == [1, 0, 1, 1, 0]
    assert records["whole"].tolist() == [0, 0, 0, 0, 1]
    assert records["weighs"].tolist() == [0, 1, 0, 0, 0]
    assert records["num_logprobs"].tolist() == [-1] * 5


def test_profiles_are_numbered_and_say_what_mass_top_p_is_of():
    params = [{"sampling_semantics": name, "top_k": 3, "top_p": 0.5} for name in PROFILES]
    records = RowRecords(masks(9)).of(rows_of(masks(9), params))
    assert records["profile"].tolist() == [0, 1, 2, 3, 4]
    assert records["weighs"].tolist() == [name.startswith("sglang") for name in PROFILES]


def test_rows_that_return_masks_are_marked():
    params = [{"return_sampling_mask": False}, {}, {"return_sampling_mask_logprobs": True}]
    records = RowRecords(masks(9)).of(rows_of(masks(9), params))
    assert records["returns_mask"].tolist() == [0, 1, 1]
    assert records["returns_mask_logprobs"].tolist() == [0, 0, 1]


def test_positions_move_on_while_the_rows_stay():
    rows, known = rows_of(masks(9), [{}, {"min_tokens": 2}]), RowRecords(masks(9))
    first = known.of(rows)
    rows[0].append(5)
    assert known.of(rows) is first
    assert first["position"].tolist() == [1, 1]
    assert known.changing == (1,)
    assert known.of(rows[:1]) is not first


def test_words_hold_every_number_in_its_type():
    records = np.zeros(2, RECORD)
    records["seed"], records["top_p"], records["select_log_min_p"] = [-(2**63), 2**63 - 1], [0.1, 1 - 2**-53], -np.inf
    words = torch.from_numpy(words_of(records))
    assert words.shape == (2, len(RECORD))
    for name in RECORD.names:
        assert column(words, name).tolist() == records[name].tolist()
