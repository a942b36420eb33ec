"""Texts of a wanted form from the engine: whole, with exact supports, with and without speculation, in any company."""

from __future__ import annotations

import json
import re

import pytest

from keepmask import LLM, SamplingParams
from keepmask.errors import RequestError

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["w300", "w301 w302"]}, "b": {"type": "boolean"}, "c": {"enum": [1, 22, 333]}},
    "required": ["a", "b", "c"],
}
FORM = {"json": SCHEMA, "disable_any_whitespace": True}


def engine(folder, **options):
    return LLM(
        str(folder),
        dtype="float32",
        device="cpu",
        kv_cache_memory_bytes=2**22,
        return_sampling_mask=True,
        logprobs_mode="processed_logprobs",
        **options,
    )


@pytest.fixture(scope="module")
def llm(tiny_with_text):
    return engine(tiny_with_text)


@pytest.fixture(scope="module")
def guessing(tiny_with_text):
    return engine(tiny_with_text, speculative_config={"method": "siblings"})


def params(seed=0, **fields):
    return SamplingParams(**{"seed": seed, "max_tokens": 120, "temperature": 1.0, "top_p": 0.9, "logprobs": 0} | fields)


def test_every_sibling_has_the_form_and_every_row_what_could_be_drawn(llm):
    (output,) = llm.generate(["a b"], params(n=4, structured_outputs=FORM), use_tqdm=False)
    for one in output.outputs:
        assert one.finish_reason == "stop"
        value = json.loads(one.text)
        assert set(value) == {"a", "b", "c"}
        assert value["c"] in (1, 22, 333)
        assert len(one.sampling_mask) == len(one.token_ids)
        assert one.sampling_mask.counts.min() == 1  # where the form leaves no choice
        for at, token_id in enumerate(one.token_ids):
            assert token_id in one.sampling_mask.row(at)
            if one.sampling_mask.counts[at] == 1:
                assert one.logprobs[at][token_id].logprob == 0
    assert len({one.text for one in output.outputs}) > 1


def test_requests_of_any_form_share_a_batch_and_speculation_changes_none(llm, guessing):
    forms = [{"regex": r"[ab]{3}\d"}, {"choice": ["w300", "w301"]}, None, FORM]
    wanted = [params(seed, n=2, structured_outputs=form, min_p=0.01) for seed, form in enumerate(forms)]
    prompts = ["x y", "x", "z z z", "w300"]
    together = llm.generate(prompts, wanted, use_tqdm=False)
    for prompt, each, output in zip(prompts, wanted, together, strict=True):
        for other in (llm, guessing):
            (alone,) = other.generate([prompt], each, use_tqdm=False)
            assert [one.token_ids for one in alone.outputs] == [one.token_ids for one in output.outputs]
            assert [one.sampling_mask for one in alone.outputs] == [one.sampling_mask for one in output.outputs]
    assert all(re.fullmatch(r"[ab]{3}\d", one.text) for one in together[0].outputs)
    assert {one.text for one in together[1].outputs} <= {"w300", "w301"}


def test_the_text_may_end_only_where_it_is_whole(llm):
    (output,) = llm.generate(
        ["a"], params(structured_outputs={"regex": "[a-z]+"}, ignore_eos=True, max_tokens=100), use_tqdm=False
    )
    one = output.outputs[0]
    assert re.fullmatch("[a-z]+", one.text)
    assert one.finish_reason in ("stop", "length")
    (cut,) = llm.generate(["a"], params(structured_outputs=FORM, max_tokens=3), use_tqdm=False)
    assert cut.outputs[0].finish_reason == "length"


def test_bans_that_leave_nothing_of_the_form_end_that_request_alone(llm):
    impossible = params(structured_outputs={"choice": ["a"]}, allowed_token_ids=[400, 401])
    failed, fine = llm.generate(["x", "x"], [impossible, params(structured_outputs={"choice": ["a"]})], use_tqdm=False)
    assert failed.outputs[0].finish_reason == "error"
    assert fine.outputs[0].text == "a"


def test_a_form_needs_a_tokenizer_and_a_meaning(llm, tiny_llm):
    with pytest.raises(RequestError, match="structured_outputs: need a tokenizer"):
        tiny_llm().generate({"prompt_token_ids": [5]}, params(structured_outputs={"regex": "a"}), use_tqdm=False)
    with pytest.raises(RequestError, match="structured_outputs:"):
        llm.generate(["a"], params(structured_outputs={"regex": "(a"}), use_tqdm=False)


def test_rollouts_carry_the_form_through_a_file(llm, tmp_path):
    from keepmask.wire.rollout_file import read_rollouts, write_rollouts

    (output,) = llm.generate(["a"], params(structured_outputs={"choice": ["a", "b"]}), use_tqdm=False)
    write_rollouts(tmp_path / "r.parquet", output.rollouts(), {})
    (read,), _ = read_rollouts(tmp_path / "r.parquet")
    assert SamplingParams(**read.sampling_params) == output.sampling_params
