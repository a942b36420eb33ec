"""A request that fails ends alone; an engine that fails leaves nothing behind."""

import math

import pytest
from scripted import Script

from keepmask import LLM, EngineError, SamplingParams

GOOD = 20
BAD = {
    30: [300, 301, ValueError("out of cheese")],
    31: [300, math.nan],
    32: [math.inf],
    33: [300, 301, 302, KeyError("seed")],
}
PARAMS = SamplingParams(
    max_tokens=8, seed=4, temperature=0.7, top_k=20, logprobs=0, ignore_eos=True, return_sampling_mask=True
)


@pytest.fixture(scope="module")
def llm(tiny_checkpoint):
    return LLM(
        str(tiny_checkpoint("llama")),
        skip_tokenizer_init=True,
        dtype="float32",
        device="cpu",
        kv_cache_memory_bytes=2**21,
        logprobs_mode="processed_logprobs",
        logits_processors=[Script(BAD)],
    )


@pytest.fixture(autouse=True)
def nothing_is_left(llm):
    yield
    stats = llm.engine.stats()
    assert llm.engine.num_unfinished == stats.num_running == stats.num_waiting == 0
    assert stats.num_free_blocks == stats.num_blocks


def generate(llm, firsts, params=PARAMS):
    prompts = [{"prompt_token_ids": [first, 5, 6]} for first in firsts]
    return llm.generate(prompts, params, use_tqdm=False)


def essence(output):
    return [(each.token_ids, each.sampling_mask.token_ids, each.finish_reason) for each in output.outputs]


@pytest.mark.parametrize(
    ("first", "num_tokens", "says"),
    [
        (30, 2, "logits processor Script failed: ValueError: out of cheese"),
        (31, 1, "logits at output position 1 hold NaN or +inf"),
        (32, 0, "logits at output position 0 hold NaN or +inf"),
        (33, 3, "logits processor Script failed: KeyError: 'seed'"),
    ],
)
def test_a_request_that_fails_ends_with_what_it_has_and_its_neighbours_go_on(llm, first, num_tokens, says):
    before, failed, after = generate(llm, [GOOD, first, GOOD + 1])
    (completion,) = failed.outputs
    assert failed.finished
    assert completion.finish_reason == "error"
    assert says in completion.stop_reason
    assert len(completion.token_ids) == len(completion.sampling_mask) == len(completion.logprobs) == num_tokens
    alone = [generate(llm, [at])[0] for at in (GOOD, GOOD + 1)]
    assert [essence(before), essence(after)] == [essence(output) for output in alone]


def test_every_sibling_of_a_failing_prompt_says_so(llm):
    (output,) = generate(llm, [30], PARAMS.replace(n=3))
    assert [completion.finish_reason for completion in output.outputs] == ["error"] * 3
    assert [completion.token_ids for completion in output.outputs] == [[300, 301]] * 3


def test_a_mask_over_its_byte_budget_ends_its_request(tiny_llm):
    llm = tiny_llm(logprobs_mode="processed_logprobs", max_mask_bytes_per_request=200)
    wide, narrow = generate(llm, [GOOD, GOOD + 1], [PARAMS, PARAMS.replace(top_k=3)])
    assert wide.outputs[0].finish_reason == "error"
    assert "max_mask_bytes_per_request" in wide.outputs[0].stop_reason
    assert len(wide.outputs[0].token_ids) == len(wide.outputs[0].sampling_mask) == 2
    assert narrow.outputs[0].finish_reason == "length"


def test_a_request_with_nothing_left_to_draw_ends(llm):
    ended, other = generate(
        llm, [GOOD, GOOD + 1], [PARAMS.replace(allowed_token_ids=[7], stop_token_ids=[7], min_tokens=1), PARAMS]
    )
    assert ended.outputs[0].finish_reason == "error"
    assert "no token is left to draw at output position 0" in ended.outputs[0].stop_reason
    assert other.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("place", ["forward", "head"])
@pytest.mark.parametrize("step", [0, 1, 3])
def test_a_failing_forward_is_an_engine_error_and_leaves_nothing(llm, monkeypatch, place, step):
    calls = iter(range(100))
    working = getattr(llm.engine.runner, place)

    def failing(*args):
        if next(calls) == step:
            raise RuntimeError("the device fell off")
        return working(*args)

    expected = [essence(output) for output in generate(llm, [GOOD, GOOD + 1])]
    monkeypatch.setattr(llm.engine.runner, place, failing)
    with pytest.raises(EngineError, match="RuntimeError: the device fell off") as error:
        generate(llm, [GOOD, GOOD + 1], PARAMS.replace(n=2))
    assert isinstance(error.value.__cause__, RuntimeError)
    stats = llm.engine.stats()
    assert llm.engine.num_unfinished == stats.num_running == stats.num_waiting == 0
    assert stats.num_free_blocks == stats.num_blocks
    monkeypatch.undo()
    assert [essence(output) for output in generate(llm, [GOOD, GOOD + 1])] == expected


def test_a_step_that_failed_can_be_taken_again(llm, monkeypatch):
    expected = essence(generate(llm, [GOOD])[0])
    request = llm.engine.add("again", [GOOD, 5, 6], PARAMS)
    llm.engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "forward", lambda *_: 1 / 0)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                llm.engine.step()
    while not request.finished:
        llm.engine.step()
    assert essence(llm.engine.output(request)) == expected


def test_a_model_that_computes_nan_for_a_request_ends_that_request(llm, monkeypatch):
    working, poison = llm.engine.runner.forward, 40

    def forward(batch, copies):
        hidden = working(batch, copies).clone()
        hidden[(batch.input_ids == poison).nonzero()] = math.nan
        return hidden

    expected = [essence(output) for output in generate(llm, [GOOD, GOOD + 1])]
    monkeypatch.setattr(llm.engine.runner, "forward", forward)
    prompts = [{"prompt_token_ids": ids} for ids in ([GOOD, 5, 6], [1, 2, poison], [GOOD + 1, 5, 6])]
    before, failed, after = llm.generate(prompts, PARAMS, use_tqdm=False)
    assert [essence(before), essence(after)] == expected
    assert failed.outputs[0].finish_reason == "error"
    assert "logits at output position 0 hold NaN or +inf" in failed.outputs[0].stop_reason
    assert failed.outputs[0].token_ids == []


def test_prompt_logprobs_are_left_out_where_the_model_computes_nan(llm, monkeypatch):
    working = llm.engine.runner.forward

    def forward(batch, copies):
        hidden = working(batch, copies).clone()
        hidden[2] = math.nan
        return hidden

    monkeypatch.setattr(llm.engine.runner, "forward", forward)
    prompt = {"prompt_token_ids": [GOOD, 5, 6, 7, 8]}
    (output,) = llm.generate(prompt, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    assert [entry is None for entry in output.prompt_logprobs] == [True, False, False, True, False]


def test_a_block_that_held_nan_does_no_harm_to_its_next_owner(tiny_llm):
    llm = tiny_llm(kv_cache_memory_bytes=2**18, logprobs_mode="processed_logprobs")
    expected = [essence(output) for output in generate(llm, [GOOD, GOOD + 1])]
    for block_size in (16, 4):
        dirty = tiny_llm(kv_cache_memory_bytes=2**18, logprobs_mode="processed_logprobs", block_size=block_size)
        for layer in dirty.engine.runner.cache.layers:
            layer.keys.fill_(math.nan)
            layer.values.fill_(math.nan)
        assert [essence(output) for output in generate(dirty, [GOOD, GOOD + 1])] == expected
