import pytest
import torch
from transformers import AutoModelForCausalLM

from keepmask import LLM, ConfigError, RequestError, SamplingParams
from keepmask.engine.policy_weights import copy_changed, policy_weights

PARAMS = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
PROMPT = {"prompt_token_ids": [5, 6, 7]}
OPTIONS = {"kv_cache_memory_bytes": 2**21, "skip_tokenizer_init": True}


@pytest.fixture
def module(tiny_checkpoint):
    return AutoModelForCausalLM.from_pretrained(tiny_checkpoint("llama"), dtype=torch.float32)


def drawn(llm):
    return llm.generate(PROMPT, PARAMS, use_tqdm=False)[0].outputs[0].token_ids


def noised(module, *names):
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            if not names or name in names:
                tensor.add_(torch.randn_like(tensor))


def saved(module, folder):
    module.save_pretrained(folder)
    return LLM(str(folder), dtype="float32", device="cpu", **OPTIONS)


def test_a_module_is_served_as_its_checkpoint_would_be(module, tiny_llm):
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    llm = LLM.from_module(module, **OPTIONS)
    assert drawn(llm) == drawn(tiny_llm())
    after = module.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    noised(module)  # an optimizer's step is not seen before `sync`
    assert drawn(llm) == drawn(tiny_llm())


def test_syncing_takes_over_the_weights_and_leaves_the_module_alone(module, tmp_path):
    llm = LLM.from_module(module, **OPTIONS)
    noised(module)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert llm.sync(module) == llm.weight_version != "default"
    assert drawn(llm) == drawn(saved(module, tmp_path))
    assert llm.sync(module, version="mine") == "mine"
    after = module.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_only_what_changed_is_written(module):
    own = LLM.from_module(module, **OPTIONS).engine.runner.model
    places = {name: tensor.data_ptr() for name, tensor in own.state_dict().items()}
    assert copy_changed(own, lambda: policy_weights(module)) == 0
    noised(module, "model.norm.weight", "lm_head.weight")
    assert copy_changed(own, lambda: policy_weights(module)) == 2
    assert {name: tensor.data_ptr() for name, tensor in own.state_dict().items()} == places


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of PEFT, about what it asks of transformers
@pytest.mark.parametrize("target_modules", [["q_proj", "down_proj"], ["lm_head"]])
def test_adapters_are_merged_on_the_way(module, tmp_path, target_modules):
    peft = pytest.importorskip("peft")
    llm = LLM.from_module(module, **OPTIONS)
    adapted = peft.get_peft_model(module, peft.LoraConfig(r=2, target_modules=target_modules, init_lora_weights=False))
    llm.sync(adapted)
    plain = drawn(llm)
    assert plain == drawn(LLM.from_module(adapted, **OPTIONS))
    assert plain == drawn(saved(adapted.merge_and_unload(), tmp_path))


def test_weights_of_another_model_change_nothing(module, tiny_checkpoint):
    llm = LLM.from_module(module, **OPTIONS)
    expected = drawn(llm)
    other = AutoModelForCausalLM.from_pretrained(tiny_checkpoint("qwen3"), dtype=torch.float32)
    with pytest.raises(RequestError, match="the model keeps its own"):
        llm.sync(other)
    broken = dict(module.state_dict())
    del broken["model.norm.weight"]
    broken |= {"lm_head.weight": broken["lm_head.weight"][:3], "x": torch.zeros(1)}
    broken["model.embed_tokens.weight"] = torch.full_like(broken["model.embed_tokens.weight"], torch.nan)
    with pytest.raises(RequestError) as error:
        copy_changed(llm.engine.runner.model, lambda: broken.items())
    for said in ("norm.weight: is missing", "lm_head.weight: shape [3, 64]", "x: the model has no", "holds NaN"):
        assert said in str(error.value)
    assert drawn(llm) == expected
    assert llm.weight_version == "default"


def test_what_is_no_language_model_is_refused():
    with pytest.raises(ConfigError, match="Linear is no causal language model of transformers"):
        LLM.from_module(torch.nn.Linear(2, 2), **OPTIONS)
