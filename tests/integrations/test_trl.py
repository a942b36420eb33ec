"""TRL's GRPO on supports: what it measures, what it trains, and what it refuses."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import trl
from trl_cases import COMMON, even_ids, policy, trainer

from keepmask.errors import ConfigError
from keepmask.integrations.rollout_backends import embedded
from keepmask.integrations.trl import ReplayGRPOConfig, ReplayGRPOTrainer

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def steps(run):
    return [entry for entry in run.state.log_history if "loss" in entry]


def test_the_first_pass_over_truncated_rollouts_has_ratio_one_at_every_step(tiny_with_text, tmp_path):
    run = trainer(tiny_with_text, tmp_path, repetition_penalty=1.2, temperature=0.9, mass_samples=1000)
    before = [p.clone() for p in run.model.parameters()]
    run.train()
    assert len(steps(run)) == 3
    for entry in steps(run):
        assert math.isfinite(entry["loss"])
        assert entry["replay/logprob_diff_max"] < 1e-4
        assert entry["replay/ratio_replayed_outside_0.1"] == 0
        # Over the whole vocabulary the ratio is the kept mass: the bias that replay takes away.
        assert entry["replay/ratio_full_mean"] == pytest.approx(entry["replay/kept_mass"], abs=1e-4)
        assert 0.8 <= entry["replay/kept_mass"] < 0.99
        assert entry["replay/support_size"] > 2
        assert min(entry["seconds/rollout"], entry["seconds/sync"]) > 0
    assert any(not torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))


def test_inner_iterations_stale_batches_and_accumulation_need_no_plumbing(tiny_with_text, tmp_path):
    run = trainer(
        tiny_with_text, tmp_path, num_iterations=2, steps_per_generation=4, gradient_accumulation_steps=2, max_steps=8,
        per_device_train_batch_size=4, beta=0.04, importance_correction="sequence_truncate",
        learning_rate=1e-4,
    )  # fmt: skip
    run.train()
    drawn_at = [entry for entry in steps(run) if "replay/logprob_diff_max" in entry]
    assert [entry["step"] for entry in drawn_at] == [1, 5]
    assert all(entry["replay/logprob_diff_max"] < 1e-4 for entry in drawn_at)
    moved = [entry for entry in steps(run) if "replay/ratio_stale_mean" in entry]
    assert [entry["step"] for entry in moved] == [2, 3, 4, 6, 7, 8]
    assert all(abs(entry["replay/ratio_stale_mean"] - 1) < 0.2 for entry in moved)
    assert all(entry["replay/importance_ratio_max"] == pytest.approx(1, abs=1e-3) for entry in steps(run))
    assert steps(run)[0]["kl"] == pytest.approx(0, abs=1e-6)  # the reference is the policy, on the same supports
    assert steps(run)[-1]["kl"] > 0


def test_adapters_reach_the_engine_merged(tiny_with_text, tmp_path):
    from peft import LoraConfig

    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], modules_to_save=["lm_head"])
    run = trainer(tiny_with_text, tmp_path, options={"peft_config": lora}, learning_rate=1e-2, beta=0.02)
    run.train()
    assert all(entry["replay/logprob_diff_max"] < 1e-4 for entry in steps(run))
    trained = [p for name, p in run.model.named_parameters() if "lora_B" in name]
    assert all(p.any() for p in trained)


def test_with_nothing_truncated_loss_and_gradients_are_those_of_trl(tiny_with_text, tmp_path):
    mine = trainer(tiny_with_text, tmp_path, top_p=1.0, temperature=0.8, beta=0.05, entropy_coef=0.01)
    plain = trainer(
        tiny_with_text, tmp_path, kind=trl.GRPOTrainer, config=trl.GRPOConfig, top_p=1.0, temperature=0.8, beta=0.05,
        entropy_coef=0.01,
    )  # fmt: skip
    rows = [{"prompt": prompt} for prompt in ("say ab", "say cd") for _ in range(4)]
    for each in (mine, plain):
        each.model.train()
        each.current_gradient_accumulation_steps = 1
    inputs = mine._generate_and_score_completions([dict(row) for row in rows])
    got = mine.compute_loss(mine.model, inputs)
    got.backward()
    wanted = plain.compute_loss(plain.model, inputs)
    wanted.backward()
    assert got.item() == pytest.approx(wanted.item(), abs=1e-6)
    assert mine._metrics["train"]["entropy"][0] == pytest.approx(plain._metrics["train"]["entropy"][0], abs=1e-5)
    for (name, a), b in zip(mine.model.named_parameters(), plain.model.parameters(), strict=True):
        assert b.grad.abs().max() > 0
        torch.testing.assert_close(a.grad, b.grad, atol=2e-5 * float(b.grad.abs().max()), rtol=1e-3, msg=name)


class Lying:
    """An engine that says it was three times less sure."""

    def __init__(self, llm):
        self._llm = llm

    def __getattr__(self, name):
        return getattr(self._llm, name)

    def rollouts(self, prompts, params):
        return [[self._changed(r) for r in each] for each in self._llm.rollouts(prompts, params)]

    def _changed(self, rollout):
        mask = type(rollout.sampling_mask)(rollout.sampling_mask.ids, rollout.sampling_mask.offsets)
        return replace(rollout, sampling_mask=mask, logprobs=rollout.logprobs - np.float32(math.log(3)))


@pytest.mark.parametrize(("correction", "cap", "weight"), [
    ("token_truncate", 2.0, 2.0), ("token_mask", 2.0, 0.0), ("token_truncate", 4.0, 3.0), ("sequence_mask", 2.0, 0.0),
])  # fmt: skip
def test_advantages_are_multiplied_by_capped_ratios_and_raw_ones_are_logged(
    tiny_with_text, tmp_path, correction, cap, weight
):
    model, _ = policy(tiny_with_text)
    backend = Lying(embedded(model, kv_cache_memory_bytes=2**22))
    run = trainer(
        tiny_with_text, tmp_path, options={"backend": backend}, importance_correction=correction, importance_cap=cap,
        loss_type="grpo",
    )  # fmt: skip
    rows = [{"prompt": prompt} for prompt in ("say ab", "say cd") for _ in range(4)]
    run.model.train()
    run.current_gradient_accumulation_steps = 1
    inputs = run._generate_and_score_completions(rows)
    weighted = run._weighted_advantages(run.model, inputs, inputs["completion_mask"])
    keep = inputs["completion_mask"].bool()
    expected = weight * inputs["advantages"][:, None].expand_as(keep)
    torch.testing.assert_close(weighted[keep], expected[keep], atol=1e-4, rtol=1e-4)
    numbers = run.meter.numbers(run.accelerator)
    if correction.startswith("token"):
        assert numbers["importance_ratio_mean"] == pytest.approx(3, abs=1e-3)
    assert numbers["importance_clipped"] == (0 if weight == 3.0 else 1)


def test_completions_without_a_reward_do_not_move_the_policy(tiny_with_text, tmp_path):
    run = trainer(
        tiny_with_text, tmp_path, reward_funcs=lambda completions, **_: [None] * len(completions), max_steps=1
    )
    before = [p.clone() for p in run.model.parameters()]
    run.train()
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))


def two_turns(prompts, run):
    """A first answer, a tool's words, a second answer."""
    prompt_ids = run.processing_class(text=prompts)["input_ids"]
    first = [each[0] for each in run.draw(prompt_ids, max_tokens=4, ignore_eos=True, stop_token_ids=[])]
    said = [[*ids, *turn.token_ids.tolist(), 65, 66] for ids, turn in zip(prompt_ids, first, strict=True)]
    second = [each[0] for each in run.draw(said, max_tokens=3)]
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": [
            [*a.token_ids.tolist(), 65, 66, *b.token_ids.tolist()] for a, b in zip(first, second, strict=True)
        ],
        "logprobs": [
            [*a.logprobs.tolist(), 0.0, 0.0, *b.logprobs.tolist()] for a, b in zip(first, second, strict=True)
        ],
        "env_mask": [[1] * 4 + [0] * 2 + [1] * b.token_ids.size for b in second],
        "rollouts": [[a, b] for a, b in zip(first, second, strict=True)],
    }


def test_turns_with_tool_output_between_them(tiny_with_text, tmp_path):
    run = trainer(tiny_with_text, tmp_path, options={"rollout_func": two_turns})
    run.train()
    assert all(entry["replay/logprob_diff_max"] < 1e-4 for entry in steps(run))
    assert steps(run)[-1]["grad_norm"] > 0


def test_a_resumed_run_takes_the_identical_next_step(tiny_with_text, tmp_path):
    whole = trainer(tiny_with_text, tmp_path / "a", max_steps=4, save_strategy="steps", save_steps=2)
    whole.train()
    resumed = trainer(tiny_with_text, tmp_path / "b", max_steps=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)
    last = [steps(run)[-1] for run in (whole, resumed)]
    assert last[0]["reward"] == last[1]["reward"]
    assert last[0]["loss"] == last[1]["loss"]


def test_without_replay_log_probabilities_are_over_the_whole_vocabulary(tiny_with_text, tmp_path):
    run = trainer(tiny_with_text, tmp_path, replay=False, max_steps=1)
    run.train()
    assert steps(run)[0]["replay/ratio_replayed_mean"] < 0.97
    assert steps(run)[0]["replay/logprob_diff_max"] > 0.05


@pytest.mark.parametrize(("change", "words"), [
    ({"use_vllm": True}, "use_vllm=True: its rollouts have no masks"),
    ({"use_transformers_continuous_batching": True}, "its rollouts have no masks"),
    ({"options": {"tools": [even_ids]}}, "tools: TRL draws the turns after the first itself, without masks"),
    ({"options": {"environment_factory": object}}, "environment_factory: TRL draws"),
    ({"rollouts": "vllm"}, "rollouts='vllm': must be 'embedded'"),
    ({"importance_correction": "tis"}, "importance_correction='tis': must be none, token_truncate"),
    ({"importance_correction": "token_mask", "loss_type": "vespo"}, "vespo takes one advantage a sequence"),
    ({"importance_cap": 0.0}, "importance_cap=0.0 must be positive"),
    ({"generation_kwargs": {"num_beams": 4}}, "num_beams"),
])  # fmt: skip
def test_what_would_not_be_scored_as_it_was_drawn_is_refused(tiny_with_text, tmp_path, change, words):
    with pytest.raises(Exception, match=words) as caught:
        trainer(tiny_with_text, tmp_path, **change)
    assert type(caught.value).__module__ == "keepmask.errors"


def test_prompt_learning_and_adapters_on_the_head_are_refused(tiny_with_text, tmp_path):
    from peft import LoraConfig, PromptTuningConfig, TaskType

    prompts = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=4)
    with pytest.raises(ConfigError, match="PromptTuningConfig: prompt learning puts vectors before the tokens"):
        trainer(tiny_with_text, tmp_path, options={"peft_config": prompts})
    lora = LoraConfig(r=4, target_modules=["lm_head"])
    with pytest.raises(ValueError, match="Applying a PEFT adapter to `lm_head` is not supported"):  # TRL's own words
        trainer(tiny_with_text, tmp_path, options={"peft_config": lora})


def test_multimodal_models_are_refused(tiny_with_text, tmp_path):
    model, _ = policy(tiny_with_text)
    model.config.vision_config = {}
    with pytest.raises(ConfigError, match="LlamaForCausalLM: multimodal models are not supported"):
        trainer(tiny_with_text, tmp_path, model=model)


def test_truncated_completions_can_be_left_out(tiny_with_text, tmp_path):
    run = trainer(tiny_with_text, tmp_path, mask_truncated_completions=True)
    run.train()
    assert all(math.isfinite(entry["loss"]) for entry in steps(run))


def test_another_version_of_trl_is_refused(tiny_with_text, tmp_path, monkeypatch):
    monkeypatch.setattr(trl, "__version__", "1.14.2")
    with pytest.raises(ConfigError, match=r"trl 1.14.2: .* from 1.15 to before 1.17"):
        trainer(tiny_with_text, tmp_path)


def test_args_of_trl_alone_are_refused(tiny_with_text, tmp_path):
    model, tokenizer = policy(tiny_with_text)
    with pytest.raises(ConfigError, match="args: must be a ReplayGRPOConfig, got GRPOConfig"):
        ReplayGRPOTrainer(model, even_ids, trl.GRPOConfig(str(tmp_path), **COMMON), processing_class=tokenizer)
    assert issubclass(ReplayGRPOConfig, trl.GRPOConfig)
