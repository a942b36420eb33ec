"""One form of heads: what transformers' models compute, and the same from the engine and from replay."""

import math

import pytest
import torch
from replay_cases import head_logits, score_rows
from transformers import CohereConfig, FalconH1Config, Gemma3TextConfig, GraniteConfig, LlamaConfig

from keepmask.engine.model_runner import LMHead
from keepmask.forward.linear import linear_layer
from keepmask.head.form import HeadForm
from keepmask.replay.support import Support

FORMS = {
    "plain": HeadForm(),
    "softcap": HeadForm(softcap=30.0),
    "both": HeadForm(softcap=30.0, scale=0.5),
    "all": HeadForm(softcap=5.0, scale=0.5, rounding="bf16"),
}


def test_the_scale_comes_before_the_softcap():
    got = HeadForm(softcap=30.0, scale=0.5).apply(torch.tensor(10.0, dtype=torch.float64))
    assert got.item() == pytest.approx(30 * math.tanh(0.5 * 10 / 30), rel=1e-15)


@pytest.mark.parametrize(
    ("config", "form"),
    [
        (LlamaConfig(), HeadForm()),
        (Gemma3TextConfig(final_logit_softcapping=7.0), HeadForm(softcap=7.0)),
        (CohereConfig(logit_scale=0.25), HeadForm(scale=0.25)),
        (GraniteConfig(logits_scaling=8.0), HeadForm(scale=0.125)),
        (FalconH1Config(lm_head_multiplier=0.5), HeadForm(scale=0.5)),
    ],
)
def test_a_config_says_the_form_of_its_head(config, form):
    assert HeadForm.of(config) == form


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_engine_and_replay_give_the_same_logits(form, dtype):
    T, E, V = 5, 32, 40
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, E, generator=generator).to(dtype) for n in (T, V))
    bias = torch.randn(V, generator=generator).to(dtype)
    linear = linear_layer([weight], [bias])
    ids, offsets = torch.arange(V, dtype=torch.int32).repeat(T), torch.arange(T + 1) * V
    engine = LMHead(hidden, linear, form)
    exact = engine.rescore(torch.arange(T), ids, offsets).view(T, V).double()
    assert torch.equal(engine.float32(torch.arange(T)).float().argmax(1), exact.argmax(1))
    rounding = form.rounding
    scores = score_rows(
        hidden, weight, torch.zeros(T, dtype=torch.int64), Support(ids, offsets),
        bias=bias, softcap=form.softcap, scale=form.scale, rounding=rounding,
    )  # fmt: skip
    replayed = scores.member_logprobs.view(T, V).double() + scores.log_normalizer[:, None].double()
    # A sum that lies on the border between two bfloat16 may be rounded to either.
    tolerance = 1e-5 if rounding is None else form.scale * 2**-8 * 32
    torch.testing.assert_close(exact, replayed, rtol=0, atol=tolerance)
    assert (exact - replayed).abs().median() <= 1e-5
    want = head_logits(hidden, weight, bias, form.softcap, form.scale)
    torch.testing.assert_close(exact, want, rtol=0, atol=tolerance)
