"""`Head.of`: what it reads of a model gives the model's own logits, adapters and their gradients included."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    PhiConfig,
    Qwen2Config,
)

from keepmask.replay import Head, LowRank, ScoreOptions, Support, logprobs_from_hidden

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT reads it

V = 61
SIZES = {
    "vocab_size": V, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "bias": PhiConfig(**SIZES),
    "softcap": Gemma2Config(**SIZES, final_logit_softcapping=3.0, tie_word_embeddings=False),
    "multiplied": CohereConfig(**SIZES, logit_scale=0.3),
    "divided": GraniteConfig(**SIZES, logits_scaling=5.0),
    "other names": GPTNeoXConfig(**SIZES),
}


def model_of(name, dtype=torch.float32):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).to(dtype)
    head = model.get_output_embeddings()
    head.weight.data.normal_(std=2.0)
    if head.bias is not None:
        head.bias.data.normal_()
    return model


def states_and_logits(model):
    """The hidden states and the model's own logits of some tokens."""
    ids = torch.arange(12)[None] % V
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base.base_model(ids, use_cache=False).last_hidden_state[0], model(ids, use_cache=False).logits[0]


def with_lora(model, **options):
    options = {"r": 4, "lora_alpha": 12, "init_lora_weights": False, "target_modules": ["lm_head"]} | options
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_the_models_own(name):
    model = model_of(name)
    head = Head.of(model)
    hidden, own = states_and_logits(model)
    assert own.abs().max() > 0.5
    torch.testing.assert_close(head.logits(hidden), own, rtol=1e-5, atol=1e-5)
    assert head.weight is model.get_output_embeddings().weight
    assert Head.of(torch.nn.Sequential(model)[0]).vocab_size == V


def test_wrapped_models_are_unwrapped():
    model = model_of("softcap")

    class Wrapper(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.module = model

    assert Head.of(Wrapper()).softcap == 3.0
    with pytest.raises(ValueError, match="Linear is no language model"):
        Head.of(torch.nn.Linear(2, 3))


@pytest.mark.parametrize("name", ["softcap", "divided"])
@pytest.mark.parametrize("impl", ["auto", "gather", "dense", "reference"])
@pytest.mark.parametrize("num_adapters", [1, 2])
def test_adapters_on_the_head_are_scored_and_trained(name, impl, num_adapters):
    model = with_lora(model_of(name))
    if num_adapters == 2:
        model.add_adapter("other", LoraConfig(r=3, init_lora_weights=False, target_modules=["lm_head"]))
        model.base_model.set_adapter(["default", "other"])
    hidden, own = states_and_logits(model)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randperm(V, generator=generator)[:n].sort().values for n in range(1, 12)] + [torch.zeros(0).long()]
    support = Support(torch.cat(rows), torch.tensor([0, *(len(row) for row in rows)]).cumsum(0))
    targets = torch.tensor([int(row[len(row) // 2]) if len(row) else 5 for row in rows])
    double = [torch.cat([own[t, row if len(row) else slice(None)].log_softmax(0)]) for t, row in enumerate(rows)]
    want = torch.stack([d[len(r) // 2] if len(r) else d[5] for d, r in zip(double, rows, strict=True)])
    parameters = [p for n, p in model.named_parameters() if "lora" in n and p.requires_grad]
    assert len(parameters) == 2 * num_adapters
    weights = torch.randn(len(rows), generator=generator)
    want_grads = torch.autograd.grad((want * weights).sum(), parameters, retain_graph=True)
    got = logprobs_from_hidden(hidden, Head.of(model), targets, support, options=ScoreOptions(impl=impl))
    torch.testing.assert_close(got.logprobs, want, rtol=0, atol=1e-5)
    got_grads = torch.autograd.grad((got.logprobs * weights).sum(), parameters)
    for one, other in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    bare = logprobs_from_hidden(hidden, model.get_output_embeddings().base_layer.weight, targets, support)
    assert (bare.logprobs - want).abs().max() > 0.1  # what leaving the adapter out would give


def test_adapters_of_half_precision_heads_and_ones_that_are_off_or_merged():
    model = with_lora(model_of("llama", torch.bfloat16))
    hidden, own = states_and_logits(model)
    torch.testing.assert_close(Head.of(model).logits(hidden), own, rtol=2**-6, atol=0.2)
    with model.disable_adapter():
        assert Head.of(model).adapters == ()
    model.merge_adapter()
    assert Head.of(model).adapters == ()
    torch.testing.assert_close(Head.of(model).logits(hidden), own, rtol=2**-6, atol=0.2)


def test_dropout_of_an_adapter_is_the_modules_own():
    model = with_lora(model_of("llama"), lora_dropout=0.5)
    hidden, _ = states_and_logits(model.eval())
    head = Head.of(model)
    quiet = head.logits(hidden)
    model.train()
    torch.manual_seed(3)
    noisy = head.logits(hidden)
    torch.manual_seed(3)
    torch.testing.assert_close(noisy, model.get_output_embeddings()(hidden))
    assert not torch.allclose(noisy, quiet)


def test_a_trained_copy_of_the_head_is_the_head():
    model = with_lora(model_of("llama"), target_modules=["q_proj"], modules_to_save=["lm_head"])
    head = Head.of(model)
    assert head.weight.requires_grad
    hidden, own = states_and_logits(model)
    torch.testing.assert_close(head.logits(hidden), own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "named"), [({"use_dora": True}, "default .Dora"), ({"lora_bias": True}, "adapter on the head: default")]
)
def test_adapters_of_other_kinds_are_refused_by_name(options, named):
    model = model_of("bias") if "lora_bias" in options else model_of("llama")
    with pytest.raises(ValueError, match=named):
        Head.of(with_lora(model, **options))


def test_a_model_whose_logits_are_something_else_is_refused():
    model = model_of("llama")
    forward = type(model).forward

    class Shifted(type(model)):
        def forward(self, *args, **kwargs):
            output = forward(self, *args, **kwargs)
            output.logits = output.logits.clamp(max=10.0)
            return output

    model.__class__ = Shifted
    with pytest.raises(ValueError, match="Shifted: its logits are not those of its head with softcap=None and scale=1"):
        Head.of(model)


def test_a_softcap_by_a_name_no_model_had_before_is_refused(monkeypatch):
    monkeypatch.setattr("keepmask.head.form._SOFTCAPS", ())
    with pytest.raises(ValueError, match="standard deviations"):
        Head.of(model_of("softcap", torch.bfloat16))


def test_the_check_leaves_the_model_as_it_was():
    model = model_of("softcap").train()
    Head.of(model)
    assert model.training
    assert model.model.training
    assert "forward" not in vars(model.model)


def test_a_low_rank_head_can_be_built_by_hand():
    weight, down, up = torch.randn(V, 8), torch.randn(2, 8), torch.randn(V, 2)
    hidden = torch.randn(5, 8)
    head = Head(weight, adapters=(LowRank(down, up, 0.5),))
    torch.testing.assert_close(head.logits(hidden), hidden @ (weight + 0.5 * up @ down).T, rtol=1e-4, atol=1e-4)
