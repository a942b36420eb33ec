import json
import shutil
from types import SimpleNamespace

import plain
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FalconConfig

import tiny
from keepmask import LLM, ConfigError, EngineConfig, SamplingParams
from keepmask.engine.loading import checkpoint, device_of, dtype_of


def load(folder, **options):
    given = {"skip_tokenizer_init": True, "dtype": "float32", "device": "cpu", "kv_cache_memory_bytes": 2**20}
    return LLM(str(folder), **given | options)


def refusal(folder, **options):
    """What is said about a checkpoint that does not load."""
    with pytest.raises(ConfigError) as error:
        load(folder, **options)
    return str(error.value)


@pytest.fixture
def copied(tiny_checkpoint, tmp_path):
    """A checkpoint to damage."""
    return shutil.copytree(tiny_checkpoint("llama"), tmp_path / "copy")


# ---------------------------------------------------------------- architectures


@pytest.mark.parametrize(
    ("architecture", "changes", "says"),
    [
        ("qwen3_next", {}, "layers of type linear_attention are not supported"),
        ("mamba", {}, "layers of type linear_attention are not supported"),
        ("llama4_text", {}, "layers of type chunked_attention are not supported"),
        ("gpt_oss", {"num_local_experts": 4, "sliding_window": 8}, "attention sinks are not supported"),
        ("bloom", {}, "do not go through transformers' attention interface"),
        ("bert", {"num_key_value_heads": 4}, "standard deviations"),  # looks ahead
        ("biogpt", {}, "is not supported"),
        (
            "gpt_neo",
            {"attention_types": [[["global", "local"], 1]]},
            "do not go through transformers' attention interface",
        ),
        ("stablelm", {}, "does not hand its caller's arguments on to the attention interface"),
        ("nemotron", {}, "does not hand its caller's arguments on to the attention interface"),
    ],
)
def test_architectures_that_cannot_run_on_the_cache_are_refused_by_name(tmp_path, architecture, changes, says):
    message = refusal(tiny.save(tmp_path, architecture, **changes))
    assert message.startswith(f"model '{tmp_path}' ({architecture})")
    assert says in message


def test_encoder_decoders_are_refused_by_name(tmp_path):
    tiny.config("t5").save_pretrained(tmp_path)
    assert "(t5): encoder-decoder models are not supported" in refusal(tmp_path)


def test_configs_without_attention_heads_are_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "xlstm"}))
    assert "(xlstm): its config has no single num_attention_heads" in refusal(tmp_path)


@pytest.mark.parametrize(
    "architecture", ["gpt2", "gpt_neox", "phi3", "qwen2", "cohere", "granite", "olmo2", "qwen3_moe"]
)
def test_other_decoders_run_as_they_do_by_themselves(tmp_path, architecture):
    changes = {"num_key_value_heads": 4} if architecture in ("gpt2", "gpt_neox") else {}
    llm = load(tiny.save(tmp_path, architecture, **changes))  # compares the two
    (output,) = llm.generate(
        {"prompt_token_ids": [3, 4]}, SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False
    )
    assert len(output.outputs[0].token_ids) == 3


@pytest.mark.parametrize(("max_model_len", "loads"), [(None, False), (65, False), (64, True)])
def test_a_rotation_that_changes_with_the_length_is_kept_to_its_first_context(tmp_path, max_model_len, loads):
    rotation = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rotation |= {"original_max_position_embeddings": 64, "factor": 4.0}
    folder = tiny.save(tmp_path, "phi3", rope_parameters=rotation, original_max_position_embeddings=64)
    if loads:
        assert load(folder, max_model_len=max_model_len).engine.max_model_len == 64
    else:
        message = refusal(folder, max_model_len=max_model_len)
        assert "(phi3): longrope is supported up to 64 tokens; set max_model_len=64 or less" in message


def test_a_rotation_of_part_of_each_head_runs(tmp_path):
    rotation = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    load(tiny.save(tmp_path, "phi", rope_parameters=rotation, num_key_value_heads=4))


def test_a_model_without_a_head_is_refused(tiny_checkpoint, monkeypatch):
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(LlamaForCausalLM, "get_output_embeddings", lambda _self: None)
    assert "(llama): has no language-model head" in refusal(tiny_checkpoint("llama"))


def test_a_config_without_a_context_length_needs_max_model_len(tiny_checkpoint, monkeypatch):
    from transformers import LlamaConfig

    folder = tiny_checkpoint("llama")
    monkeypatch.delattr(LlamaConfig, "max_position_embeddings", raising=False)
    monkeypatch.setattr(LlamaConfig, "__getattribute__", without_context(LlamaConfig.__getattribute__))
    assert "names no context length; give one" in refusal(folder)


def without_context(plain):
    def read(self, name):
        if name == "max_position_embeddings":
            return None
        return plain(self, name)

    return read


def test_a_head_that_is_more_than_a_linear_map_is_refused(tiny_checkpoint, monkeypatch):
    from transformers import LlamaForCausalLM

    plain = LlamaForCausalLM.forward

    def doubled(self, *args, **kwargs):
        output = plain(self, *args, **kwargs)
        output.logits = output.logits * 2
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", doubled)
    assert "(llama): is not supported: on a paged cache its logits are off" in refusal(tiny_checkpoint("llama"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_the_comparison_at_load_allows_for_rounding(tiny_checkpoint, architecture, dtype):
    assert load(tiny_checkpoint(architecture), dtype=dtype).engine.runner.dtype == getattr(torch, dtype)


@pytest.mark.parametrize("max_model_len", [1, 2, 7])
def test_a_context_shorter_than_the_comparison_loads(tiny_checkpoint, max_model_len):
    assert load(tiny_checkpoint("llama"), max_model_len=max_model_len).engine.max_model_len == max_model_len


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("name", ["/no/such/folder", "./nowhere", "../nowhere", "~/nowhere-at-all"])
def test_a_path_to_no_folder_is_refused_at_once(name):
    assert refusal(name) == (
        f"model {name!r}: there is no such folder; "
        "give a checkpoint folder, a Hugging Face hub id, or a packaged model: smollm2-135m"
    )


def test_a_name_the_hub_does_not_give_says_what_may_be_named(monkeypatch):
    def unreachable(*_, **__):
        raise OSError("We couldn't connect.\nCheck your connection.")

    monkeypatch.setattr("keepmask.engine.loading.AutoConfig.from_pretrained", unreachable)
    message = refusal("smollm2")
    assert "cannot be loaded: OSError: We couldn't connect. Check your connection; give a checkpoint folder" in message


def test_a_folder_may_be_named_from_home(tiny_checkpoint, monkeypatch):
    folder = tiny_checkpoint("llama")
    monkeypatch.setenv("HOME", str(folder.parent))
    assert checkpoint(f"~/{folder.name}") == str(folder)


def test_an_empty_folder_is_refused(tmp_path):
    assert "cannot be loaded" in refusal(tmp_path)


def test_a_config_that_is_no_json_is_refused(copied):
    (copied / "config.json").write_text("{")
    assert "cannot be loaded" in refusal(copied)


def test_pickled_weights_are_never_read(copied):
    file = copied / "model.safetensors"
    torch.save(load_file(file), copied / "pytorch_model.bin")
    file.unlink()
    with pytest.raises(ConfigError, match="safetensors"):
        LLM(str(copied), skip_tokenizer_init=True)


def test_an_unknown_architecture_is_refused(copied):
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"model_type": "llama_of_the_future"}))
    assert "llama_of_the_future" in refusal(copied)


@pytest.mark.parametrize("size", [0, 4, 1000])
def test_truncated_weights_are_refused(copied, size):
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:size])
    assert "cannot be loaded" in refusal(copied)


def test_weights_that_are_missing_are_named(copied):
    file = copied / "model.safetensors"
    weights = load_file(file)
    for name in ("lm_head.weight", "model.layers.1.mlp.up_proj.weight"):
        del weights[name]
    save_file(weights, file, metadata={"format": "pt"})
    message = refusal(copied)
    assert "2 of its weights are not in the checkpoint: lm_head.weight, model.layers.1.mlp.up_proj.weight" in message


def test_weights_of_another_shape_are_refused(copied):
    file = copied / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] = weights["lm_head.weight"][:100].clone()
    save_file(weights, file, metadata={"format": "pt"})
    assert "cannot be loaded" in refusal(copied)


def test_tied_heads_are_not_missing(tmp_path):
    load(tiny.save(tmp_path, "llama", tie_word_embeddings=True))


def test_names_of_packaged_models_lead_to_their_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("keepmask.models.bundled.path", lambda name, dtype: tmp_path / f"{name}-{dtype}")
    assert checkpoint("smollm2-135m") == str(tmp_path / "smollm2-135m-float32")
    assert checkpoint("smollm2-135m", torch.bfloat16) == str(tmp_path / "smollm2-135m-bfloat16")
    assert checkpoint("org/model") == "org/model"


# ---------------------------------------------------------------- tokenizers


def test_a_model_without_a_tokenizer_says_what_to_do(tiny_checkpoint):
    message = refusal(tiny_checkpoint("llama"), skip_tokenizer_init=False)
    assert message.startswith("tokenizer of")
    assert message.endswith("give tokenizer=... or skip_tokenizer_init=True")


def test_a_tokenizer_in_python_is_refused(tiny_with_text, monkeypatch):
    slow = SimpleNamespace(is_fast=False)
    monkeypatch.setattr("keepmask.engine.loading.AutoTokenizer.from_pretrained", lambda *_, **__: slow)
    message = refusal(tiny_with_text, skip_tokenizer_init=False)
    assert message.endswith("needs a fast tokenizer (tokenizer.json)")


def test_the_tokenizer_may_lie_elsewhere(tiny_checkpoint, tiny_with_text):
    llm = load(tiny_checkpoint("llama"), skip_tokenizer_init=False, tokenizer=str(tiny_with_text))
    assert llm.get_tokenizer().eos_token_id == tiny.EOS


def test_every_end_of_sequence_id_ends_a_completion(copied):
    config = json.loads((copied / "generation_config.json").read_text())
    (copied / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": [77, 78]}))
    assert load(copied).engine.eos_token_ids == (tiny.EOS, 77, 78)


def test_an_end_of_sequence_id_outside_the_vocabulary_is_refused(copied):
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"eos_token_id": 50256}))
    assert "50256 is no token id; must be in [0, 512)" in refusal(copied)


def test_ids_the_tokenizer_does_not_map_can_be_banned(tiny_with_text, tmp_path):
    folder = tiny.save(tmp_path, "llama", vocab_size=520)
    llm = load(folder, skip_tokenizer_init=False, tokenizer=str(tiny_with_text), ban_unmapped_token_ids=True)
    assert llm.engine.sampler.spec.banned_token_ids == tuple(range(512, 520))
    params = SamplingParams(max_tokens=4, temperature=9.0, logit_bias={515: 100.0})
    (output,) = llm.generate("w300", params, use_tqdm=False)
    assert max(output.outputs[0].token_ids) < 512


def test_banning_what_a_tokenizer_does_not_map_needs_a_tokenizer(tiny_checkpoint):
    assert "only a tokenizer knows" in refusal(tiny_checkpoint("llama"), ban_unmapped_token_ids=True)


# ---------------------------------------------------------------- device, memory


def test_a_cuda_device_that_is_not_there_is_refused(tiny_checkpoint, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device is available; use device='cpu' or 'auto'" in refusal(tiny_checkpoint("llama"), device="cuda")
    assert device_of(EngineConfig(model="m")) == torch.device("cpu")


@pytest.mark.parametrize(("fast", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_takes_bfloat16_where_the_cpu_computes_it(monkeypatch, fast, dtype):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: fast)
    assert dtype_of(EngineConfig(model="m"), torch.device("cpu")) == dtype
    assert dtype_of(EngineConfig(model="m"), torch.device("cuda")) == torch.bfloat16
    assert dtype_of(EngineConfig(model="m", dtype="float16"), torch.device("cpu")) == torch.float16


BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4  # layers, keys and values, heads, dim, tokens, float32


def test_a_cache_smaller_than_a_block_is_refused(tiny_checkpoint):
    message = refusal(tiny_checkpoint("llama"), kv_cache_memory_bytes=100)
    assert "100" in message
    assert str(BLOCK_BYTES) in message


@pytest.mark.parametrize("max_model_len", [160, 161])
def test_a_cache_smaller_than_the_context_says_how_much_is_needed(tiny_checkpoint, max_model_len):
    folder = tiny_checkpoint("llama")
    needed = -(-max_model_len // 16) * BLOCK_BYTES
    message = refusal(folder, max_model_len=max_model_len, kv_cache_memory_bytes=needed - 1)
    assert str(needed) in message
    assert "raise kv_cache_memory_bytes" in message
    llm = load(folder, max_model_len=max_model_len, kv_cache_memory_bytes=needed)
    assert llm.engine.max_model_len == max_model_len


def test_the_models_context_shrinks_to_the_cache_unless_it_was_asked_for(tiny_checkpoint):
    llm = load(tiny_checkpoint("llama"), kv_cache_memory_bytes=5 * BLOCK_BYTES + 7)
    assert llm.engine.max_model_len == 80
    assert llm.engine.stats().num_blocks == 5


def test_a_context_beyond_the_models_is_refused(tiny_checkpoint):
    assert "max_model_len=257: the model's context is 256 tokens" in refusal(
        tiny_checkpoint("llama"), max_model_len=257
    )


def test_by_default_the_cache_holds_no_more_than_can_be_used(tiny_checkpoint):
    llm = load(tiny_checkpoint("llama"), kv_cache_memory_bytes=None, max_num_seqs=3, max_model_len=100)
    assert llm.engine.stats().num_blocks == 3 * 7


@pytest.mark.parametrize("changes", [{}, {"new_decoder_architecture": True, "num_kv_heads": 2}, {"alibi": True}])
def test_falcon_is_refused_by_name(tmp_path, changes):
    shape = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    AutoModelForCausalLM.from_config(FalconConfig(**shape, **changes)).save_pretrained(tmp_path)
    assert "(falcon): is not supported: its layers do not go through transformers' attention" in refusal(tmp_path)


def test_layers_may_differ_in_the_size_of_their_heads(tmp_path):
    llm = load(tiny.save(tmp_path, "gemma4_text", global_head_dim=32), kv_cache_memory_bytes=2**22)
    assert [layer.keys.shape[2] for layer in llm.engine.runner.cache.layers] == [16, 32]
    ids = list(range(5, 30))
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    want = torch.from_numpy(plain.logits(tmp_path, ids)).log_softmax(-1)
    for at, entry in enumerate(output.prompt_logprobs[1:]):
        assert abs(entry[ids[at + 1]].logprob - float(want[at, ids[at + 1]])) < 1e-4
