"""The policy's weights on their way to whoever draws, and who that may be."""

import pytest
import torch
from serving import Serving
from transformers import AutoModelForCausalLM
from trl_cases import policy, trainer

import tiny
from keepmask.backends.http import Client
from keepmask.engine.policy_weights import policy_weights
from keepmask.errors import ConfigError
from keepmask.integrations.rollout_backends import embedded, rollouts_from

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def test_a_model_made_in_memory_is_served():

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(tiny.config("llama", tie_word_embeddings=True))
    llm = embedded(model, kv_cache_memory_bytes=2**22)
    held = llm.engine.weights()
    assert held.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(held[name], value, atol=0, rtol=0, msg=name)


def test_weights_of_adapted_layers_have_the_plain_models_names_and_merged_values(tiny_with_text):
    from peft import LoraConfig, get_peft_model

    plain, _ = policy(tiny_with_text)
    model, _ = policy(tiny_with_text)
    lora = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
    adapted = get_peft_model(model, lora)
    got = dict(policy_weights(adapted))
    assert got.keys() == plain.state_dict().keys()
    merged = adapted.merge_and_unload().state_dict()
    for name, value in got.items():
        torch.testing.assert_close(value, merged[name], msg=name)


def test_rollouts_come_from_a_server_and_weights_go_there(tiny_with_text, tmp_path):
    options = {"return_sampling_mask": True, "logprobs_mode": "processed_logprobs", "kv_cache_memory_bytes": 2**22}
    with Serving(tiny_with_text, engine=options, api_keys=("key",), enable_weight_updates=True) as serving:
        run = trainer(tiny_with_text, tmp_path, rollouts=serving.url, rollout_options={"api_key": "key"})
        run.train()
        steps = [entry for entry in run.state.log_history if "loss" in entry]
        assert len(steps) == 3
        assert all(entry["replay/logprob_diff_max"] < 1e-4 for entry in steps)
        with Client(serving.url, api_key="key") as client:
            assert client.weight_version == "2"  # those of the last generation
        run.backend.close()
        serving.settle()


def test_what_cannot_draw_is_refused(tiny_with_text):
    model, _ = policy(tiny_with_text)
    with pytest.raises(ConfigError, match="rollouts='vllm': must be 'embedded', a server's URL, or an object like"):
        rollouts_from("vllm", model, {})
    with pytest.raises(ConfigError, match="backend: dict has not the methods of"):
        rollouts_from({}, model, {})
