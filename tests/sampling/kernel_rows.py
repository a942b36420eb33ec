"""Rows for the tests of the candidate kernels, and where their Triton forms run: a CUDA device, or the interpreter."""

import numpy as np
import pytest
import torch

import oracle
from keepmask.sampling.cuda.draw_records import words_of
from keepmask.sampling.records import RECORD
from keepmask.sampling.row_records import PROFILES

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# The interpreter computes with NumPy, which warns where a GPU does not.
interpreted = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

OFF = 2**31 - 1
CODES = {name: code for code, name in enumerate(PROFILES)}


def row(
    *,
    temperature=1.0,
    top_k=OFF,
    top_p=1.0,
    min_p=0.0,
    profile="vllm",
    greedy=False,
    seed=0,
    position=0,
    completion=0,
    num_logprobs=-1,
    weighs=False,
):
    """The fields of one row, with what its filters mean for the selection of candidates."""
    ranks, cuts, floors = top_k < OFF, top_p < 1, min_p > 0
    log_min_p = np.log(min_p) if min_p else -np.inf
    needs_all = not (ranks or (floors and profile != "hf")) or profile.startswith("sglang")
    bounded_by_min_p = floors and not greedy and not (profile == "hf" and cuts and ranks)
    select_k = 1 if greedy else top_k if ranks else 0
    by_rank = select_k > 0 or bounded_by_min_p
    return {
        "greedy": greedy,
        "top_k": top_k,
        "profile": CODES[profile],
        "position": position,
        "completion": completion,
        "seed": seed,
        "whole": not (by_rank or cuts),
        "weighs": weighs or (cuts and not greedy and needs_all),
        "select_k": select_k,
        "by_rank": by_rank,
        "num_logprobs": num_logprobs,
        "temperature": np.float32(temperature),
        "top_p": top_p,
        "log_min_p": log_min_p,
        "select_log_min_p": log_min_p if bounded_by_min_p else -np.inf,
        "select_top_p": 1.0 if by_rank else top_p,
    }


def table(rows, *, source=None, with_logprobs=True):
    """[M, fields] words of such rows. By default row m reads logits m, and returns its log-probs."""
    records = np.zeros(len(rows), RECORD)
    for m, fields in enumerate(rows):
        for name, value in fields.items():
            records[name][m] = value
    records["source"] = np.arange(len(rows)) if source is None else source
    records["returns_mask"], records["returns_mask_logprobs"] = 1, with_logprobs
    return torch.from_numpy(words_of(records)).to(DEVICE)


def on_device(array):
    return torch.as_tensor(np.asarray(array)).to(DEVICE)


FILTERS = [
    {"top_k": 20},
    {"top_k": 50, "top_p": 0.9, "temperature": 0.7},
    {"top_p": 0.6},
    {"top_p": 0.95, "temperature": 1.3},
    {"min_p": 0.05},
    {"min_p": 0.01, "top_p": 0.8},
    {"min_p": 0.02, "top_k": 30, "top_p": 0.5},
    {"top_k": 1},
    {"greedy": True},
    {},
]


def close_scores(V=150, seed=9):
    """[V] float32 logits whose two best scores at the first draw all but tie, and the distance of those."""
    noise = oracle.gumbel(np.arange(V), seed, 0, 0)
    other = (noise[:, None] - noise).astype(np.float32)  # the logit of b at which it ties with a, whose logit is 0
    distance = np.abs(other + noise - noise[:, None])
    distance[distance == 0] = np.inf
    a, b = np.unravel_index(np.argmin(distance), distance.shape)
    z = np.full(V, -100, np.float32)
    z[a], z[b] = 0, other[a, b]
    return z, distance[a, b]
