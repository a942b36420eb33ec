"""The model's log-probabilities on supports against a dense masked definition, through every way a trainer batches."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from replay_cases import Token
from transformers import AutoModelForCausalLM

from keepmask import MaskError, SamplingParams, replay

# PEFT asks transformers for a property that was renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

IGNORED = -100
COMMON = {"max_tokens": 9, "logprobs": 0, "return_sampling_mask": True, "ignore_eos": True}
PARAMS = [
    SamplingParams(top_p=0.8, seed=1, **COMMON),
    SamplingParams(top_p=0.95, top_k=50, temperature=0.7, seed=2, **COMMON),
    SamplingParams(top_k=20, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, seed=3, **COMMON),
    SamplingParams(top_p=0.9, logit_bias={7: 2.0, 9: -1.0}, seed=4, **COMMON),
    SamplingParams(seed=5, **COMMON),  # nothing truncated: empty rows
]


@pytest.fixture(scope="module")
def rollouts(tiny_llm):
    llm = tiny_llm(return_sampling_mask=True, logprobs_mode="processed_logprobs")
    prompts = [{"prompt_token_ids": list(range(3 + i, 9 + 2 * i))} for i in range(len(PARAMS))]
    return [out.rollouts()[0] for out in llm.generate(prompts, PARAMS, use_tqdm=False)]


@pytest.fixture
def model(tiny_checkpoint):
    return AutoModelForCausalLM.from_pretrained(tiny_checkpoint("llama"), dtype=torch.float32)


def by_definition(model, rollout):
    """[T] log-probabilities and entropies of one rollout, dense, masked, in float64 but for the model's logits."""
    tokens = torch.tensor([[*rollout.prompt_token_ids, *rollout.token_ids]])
    logits = model(tokens).logits[0].double()
    params = SamplingParams(**rollout.sampling_params)
    values, entropies, output = [], [], []
    for t, target in enumerate(rollout.token_ids.tolist()):
        token = Token(
            support=None, target=target, temperature=params.temperature, logit_bias=params.logit_bias,
            repetition_penalty=params.repetition_penalty, frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty, prompt=rollout.prompt_token_ids.tolist(), output=list(output),
        )  # fmt: skip
        z = token.transform(logits[len(rollout.prompt_token_ids) + t - 1])
        row = rollout.sampling_mask.row(t)
        keep = torch.ones(z.numel(), dtype=torch.bool)
        if row is not None and len(row):
            keep = torch.zeros_like(keep).index_fill(0, torch.tensor(row.astype(np.int64)), True)
        logp = z.masked_fill(~keep, -torch.inf).log_softmax(-1)
        values.append(logp[target])
        entropies.append(-(logp.exp() * logp.masked_fill(~keep, 0)).sum())
        output.append(target)
    return torch.stack(values), torch.stack(entropies)


def padded(rollouts, order, *, extra_left=0):
    """Left-padded prompts and right-padded completions, as TRL lays them out, and labels of the completions."""
    chosen = [rollouts[i] for i in order]
    prompt = max(r.prompt_token_ids.size for r in chosen) + extra_left
    width = prompt + max(r.token_ids.size for r in chosen)
    ids, mask, labels = (torch.zeros(len(chosen), width, dtype=torch.long) for _ in range(3))
    labels.fill_(IGNORED)
    for row, r in enumerate(chosen):
        begin, end = prompt - r.prompt_token_ids.size, prompt + r.token_ids.size
        ids[row, begin:end] = torch.tensor([*r.prompt_token_ids, *r.token_ids])
        mask[row, begin:end] = 1
        labels[row, prompt:end] = ids[row, prompt:end]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}, prompt


def store_of(rollouts, **options):
    store = replay.MaskStore(512, **options)
    store.add(rollouts)
    return store


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(mine, reference):
    assert mine.keys() == reference.keys()
    for name, grad in reference.items():
        scale = grad.abs().max().clamp(min=1e-6)
        assert ((mine[name] - grad).abs().max() / scale).item() < 2e-4, name


def test_scores_and_gradients_equal_the_dense_masked_definition_in_any_batching(rollouts, model):
    weights = torch.linspace(0.5, 1.5, 9)
    wanted = [by_definition(model, r) for r in rollouts]
    (sum((logp * weights - 0.1 * h).sum() for logp, h in wanted)).float().backward()
    reference = gradients(model)
    model.zero_grad()

    replay.add_lm_head(model, store_of(rollouts), entropy="grad")
    for order, left in (([3, 0], 0), ([4, 2, 1], 5)):  # two micro-batches, shuffled
        inputs, prompt = padded(rollouts, order, extra_left=left)
        out = model(**inputs, fused_lm_head=True)
        got = out.log_probs[:, prompt - 1 :]
        for row, index in enumerate(order):
            logp, entropy = (x.detach() for x in wanted[index])
            assert (got[row].detach() - logp).abs().max() < 1e-5
            assert (out.entropy[row, prompt - 1 :].detach() - entropy).abs().max() < 1e-5
        assert (out.log_probs[:, : prompt - 1] == 0).all()
        (got * weights - 0.1 * out.entropy[:, prompt - 1 :]).sum().backward()
    assert_same_gradients(gradients(model), reference)


def test_with_the_engines_weights_scores_are_the_rollouts_own(rollouts, model):
    replay.add_lm_head(model, store_of(rollouts))
    inputs, prompt = padded(rollouts, range(len(rollouts)))
    with torch.no_grad():
        got = model(**inputs, fused_lm_head=True).log_probs[:, prompt - 1 :].numpy()
    for row, rollout in zip(got, rollouts, strict=True):
        np.testing.assert_allclose(row, rollout.logprobs, atol=1e-5)


def test_the_same_sequence_several_times_in_a_batch(rollouts, model):
    replay.add_lm_head(model, store_of([*rollouts, rollouts[1]]))
    order = [1, 0, 1, 2, 1]
    inputs, prompt = padded(rollouts, order)
    with torch.no_grad():
        got = model(**inputs, fused_lm_head=True).log_probs[:, prompt - 1 :].numpy()
    for row, index in zip(got, order, strict=True):
        np.testing.assert_allclose(row, rollouts[index].logprobs, atol=1e-5)


def test_packed_sequences_are_parted_at_their_positions(rollouts, model):
    replay.add_lm_head(model, store_of(rollouts))
    inputs, prompt = padded(rollouts, range(len(rollouts)))
    with torch.no_grad():
        apart = model(**inputs, fused_lm_head=True).log_probs[:, prompt - 1 :]
        sizes = [r.prompt_token_ids.size + r.token_ids.size for r in rollouts]
        ids = torch.tensor([[int(i) for r in rollouts for i in (*r.prompt_token_ids, *r.token_ids)]])
        positions = torch.cat([torch.arange(n) for n in sizes])[None]
        shifted = torch.cat(
            [
                torch.tensor([IGNORED] * (r.prompt_token_ids.size - 1) + r.token_ids.tolist() + [IGNORED])
                for r in rollouts
            ]
        )[None]
        out = model(input_ids=ids, position_ids=positions, shift_labels=shifted, fused_lm_head=True)
    assert out.log_probs.shape == ids.shape
    torch.testing.assert_close(out.log_probs[shifted != IGNORED], apart.flatten(), atol=1e-5, rtol=0)


def test_positions_that_are_not_asked_for_hold_zero(rollouts, model):
    replay.add_lm_head(model, store_of(rollouts))
    inputs, prompt = padded(rollouts, [0, 1])
    with torch.no_grad():
        whole = model(**inputs, fused_lm_head=True).log_probs
        inputs["labels"][:, prompt + 3] = IGNORED
        part = model(**inputs, fused_lm_head=True)
    assert (part.log_probs[:, prompt + 2] == 0).all()
    keep = torch.arange(whole.shape[1]) != prompt + 2
    assert torch.equal(part.log_probs[:, keep], whole[:, keep])
    torch.testing.assert_close(part.loss, -part.log_probs.sum() / (2 * 8))


def test_the_kept_mass_of_some_rows_comes_along(rollouts, model):
    replay.add_lm_head(model, store_of(rollouts), mass_samples=6)
    inputs, prompt = padded(rollouts, [0])
    mass = model(**inputs, fused_lm_head=True).kept_mass[0, prompt - 1 :]
    assert (~mass.isnan()).sum() == 6
    logits = model(inputs["input_ids"]).logits[0, prompt - 1 : -1].double()
    for t in (~mass.isnan()).nonzero()[:, 0].tolist():
        row = torch.tensor(rollouts[0].sampling_mask.row(t).astype(np.int64))
        assert abs(logits[t].softmax(-1)[row].sum() - mass[t]) < 1e-5


def test_tokens_between_turns_are_not_scored(tiny_llm, model):
    llm = tiny_llm(return_sampling_mask=True, logprobs_mode="processed_logprobs")
    (first,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, PARAMS[0], use_tqdm=False)[0].rollouts()
    said = [*first.prompt_token_ids.tolist(), *first.token_ids.tolist(), 40, 41, 42]  # and a tool's answer
    (second,) = llm.generate({"prompt_token_ids": said}, PARAMS[2], use_tqdm=False)[0].rollouts()
    store = replay.MaskStore(512)
    store.add([[first, second]], appended_token_ids=[[2]])
    ids = torch.tensor([[*said, *second.token_ids.tolist(), 2]])
    labels = ids.clone()
    labels[:, :3] = IGNORED
    replay.add_lm_head(model, store)
    with torch.no_grad():
        got = model(input_ids=ids, labels=labels, fused_lm_head=True).log_probs[0].numpy()
    np.testing.assert_allclose(got[2:11], first.logprobs, atol=1e-5)
    assert (got[11:14] == 0).all()
    np.testing.assert_allclose(got[14:23], second.logprobs, atol=1e-5)
    assert got[23] == 0


def test_a_sequence_without_a_rollout_is_refused_unless_said_otherwise(rollouts, model):
    inputs, prompt = padded(rollouts, [4])  # the one with nothing truncated
    replay.add_lm_head(model, store_of(rollouts[:4]))
    with pytest.raises(MaskError, match=r"sequence 0 \(\d+ tokens\): no rollout in the store has its tokens"):
        model(**inputs, fused_lm_head=True)
    replay.add_lm_head(model, store_of(rollouts[:4], unrecorded={"temperature": 1.0}))
    with torch.no_grad():
        got = model(**inputs, fused_lm_head=True).log_probs[0, prompt - 1 :].numpy()
    np.testing.assert_allclose(got, rollouts[4].logprobs, atol=1e-5)


def test_labels_that_are_not_the_drawn_tokens_are_refused(rollouts, model):
    replay.add_lm_head(model, store_of(rollouts))
    inputs, prompt = padded(rollouts, [0])
    inputs["labels"][0, prompt] += 1
    with pytest.raises(MaskError, match="labels: 1 are not the tokens that were drawn"):
        model(**inputs, fused_lm_head=True)


def test_the_same_tokens_drawn_with_other_parameters_are_refused(rollouts):
    from dataclasses import replace

    store = store_of(rollouts)
    store.add(rollouts[:1])  # the same again is fine
    assert len(store) == len(rollouts)
    other = replace(rollouts[0], sampling_params={**rollouts[0].sampling_params, "temperature": 0.5})
    with pytest.raises(MaskError, match="has the tokens of another rollout in the store"):
        store.add([other])
    store.clear()
    store.add([other])


def test_calls_without_the_flag_go_to_the_models_own_forward(rollouts, model):
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        before = model(ids, labels=ids)
        replay.add_lm_head(model, store_of(rollouts))
        after = model(ids, labels=ids)
        generated = model.generate(ids, max_new_tokens=3, do_sample=False)
    assert torch.equal(before.logits, after.logits)
    assert torch.equal(before.loss, after.loss)
    assert generated.shape == (1, 6)


def test_a_batch_without_labels_is_a_differentiable_zero(rollouts, model):
    replay.add_lm_head(model, store_of(rollouts))
    inputs, _ = padded(rollouts, [0, 1])
    inputs["labels"].fill_(IGNORED)
    out = model(**inputs, fused_lm_head=True)
    out.log_probs.sum().backward()
    assert out.loss == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_through_lora_equal_the_dense_masked_definition(rollouts, model, checkpointing):
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    sum(by_definition(adapted, r)[0].sum() for r in rollouts).float().backward()
    reference = gradients(adapted)
    adapted.zero_grad()
    if checkpointing:
        adapted.get_base_model().activation_checkpointing_enable({"use_reentrant": False})
        adapted.train()
    replay.add_lm_head(adapted, store_of(rollouts))
    inputs, _ = padded(rollouts, range(len(rollouts)))
    adapted(**inputs, fused_lm_head=True).log_probs.sum().backward()
    assert_same_gradients(gradients(adapted), reference)


def test_a_head_trained_whole_under_peft_is_the_one_that_is_scored(rollouts, model):
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    with torch.no_grad():
        head = adapted.get_base_model().lm_head.modules_to_save["default"]
        head.weight.mul_(1.5)
    replay.add_lm_head(adapted, store_of(rollouts))
    inputs, prompt = padded(rollouts, [0])
    got = adapted(**inputs, fused_lm_head=True).log_probs[0, prompt - 1 :]
    wanted, _ = by_definition(adapted, rollouts[0])
    torch.testing.assert_close(got.double(), wanted, atol=1e-5, rtol=0)
    got.sum().backward()
    assert head.weight.grad.any()
    with adapted.disable_adapter():
        other = adapted(**inputs, fused_lm_head=True).log_probs[0, prompt - 1 :]
    np.testing.assert_allclose(other.detach().numpy(), rollouts[0].logprobs, atol=1e-5)


def test_an_adapter_on_the_head_is_scored_and_trained(rollouts, model):
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["lm_head", "q_proj"], init_lora_weights=False))
    sum(by_definition(adapted, r)[0].sum() for r in rollouts).float().backward()
    reference = gradients(adapted)
    adapted.zero_grad()
    replay.add_lm_head(adapted, store_of(rollouts))
    inputs, _ = padded(rollouts, range(len(rollouts)))
    adapted(**inputs, fused_lm_head=True).log_probs.sum().backward()
    assert any("lm_head.lora_B" in name for name in reference)
    assert_same_gradients(gradients(adapted), reference)


def test_logits_that_are_not_the_heads_are_refused(rollouts, model):
    own = model.forward

    def scaled(*args, **kwargs):
        output = own(*args, **kwargs)
        output.logits = output.logits * 2
        return output

    model.forward = scaled
    with pytest.raises(ValueError, match="its logits are not those of its head"):
        replay.add_lm_head(model, store_of(rollouts))


@pytest.mark.parametrize("architecture", ["gemma2", "qwen3"])
def test_caps_and_tied_heads(tmp_path, architecture):
    import tiny
    from keepmask import LLM

    folder = tiny.save(tmp_path / architecture, architecture, tie_word_embeddings=True)
    llm = LLM(str(folder), dtype="float32", kv_cache_memory_bytes=2**22, skip_tokenizer_init=True, device="cpu",
              return_sampling_mask=True, logprobs_mode="processed_logprobs")  # fmt: skip
    rollouts = llm.generate({"prompt_token_ids": [4, 5, 6]}, PARAMS[0], use_tqdm=False)[0].rollouts()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    by_definition(model, rollouts[0])[0].sum().float().backward()
    reference = gradients(model)
    model.zero_grad()
    replay.add_lm_head(model, store_of(rollouts))
    inputs, prompt = padded(rollouts, [0])
    got = model(**inputs, fused_lm_head=True).log_probs[0, prompt - 1 :]
    np.testing.assert_allclose(got.detach().numpy(), rollouts[0].logprobs, atol=1e-5)
    got.sum().backward()
    assert_same_gradients(gradients(model), reference)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2", "fsdp2-head"])
def test_gradients_of_two_ranks_are_those_of_the_whole_batch(tiny_checkpoint, tmp_path, wrapper):
    script = Path(__file__).with_name("lm_head_rank.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(
        [*command, wrapper, str(tiny_checkpoint("llama")), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert len(list(tmp_path.glob("equal*"))) == 2, done.stderr[-3000:]
