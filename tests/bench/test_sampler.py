"""The path that sorts, which the sampler is measured against, is no straw man: it draws from the right ids."""

import numpy as np
import pytest
import torch

from keepmask.bench.sampler import logits_like_a_model, measure, sort_based
from keepmask.params import SamplingParams


@pytest.mark.parametrize("options", [{"top_k": 9, "top_p": 0.8}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 0.0}])
def test_the_sorting_path_keeps_what_the_rules_keep(options):
    logits = logits_like_a_model(3, 700)
    params = SamplingParams(**options)
    token_ids, logprobs, kept = sort_based(logits, params)
    for b in range(3):
        z = logits[b].double().numpy()
        p = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
        order = np.argsort(-p)
        keep = order[: params.top_k] if params.top_k > 0 else order
        keep = keep[p[keep] >= params.min_p * p.max()]
        mass = p[keep] / p[keep].sum()
        keep = keep[np.cumsum(mass) - mass < params.top_p] if params.top_p < 1 else keep
        keep = keep[:1] if params.greedy else keep
        assert set(kept[b].tolist()) == set(keep.tolist())
        assert int(token_ids[b]) in kept[b]
        if not params.greedy:
            want = np.log(p[int(token_ids[b])] / p[keep].sum())
            assert float(logprobs[b, 0]) == pytest.approx(want, abs=1e-4)


def test_a_case_gives_a_row_for_each_implementation():
    rows = list(measure(2, 4000, "top_p .95", {"top_p": 0.95}))
    assert [row["implementation"] for row in rows] == ["topk", "fast", "sort-based"]
    assert {row["op"] for row in rows} == {"sample top_p .95"}
    assert rows[0]["over_topk"] == 1.0
    assert rows[2]["sort_based_over"] == 1.0
    assert torch.tensor([row["p50"] for row in rows]).gt(0).all()
