import numpy as np
import plain
import pytest
from scripted import Script

import tiny
from keepmask import LLM, SamplingMask, SamplingParams
from oracle import log_softmax

TOKENIZER = tiny.byte_tokenizer()
HELLO = TOKENIZER.encode("hello 😀 there", add_special_tokens=False)
W300, W301, W302 = 300, 301, 302
SCRIPTS = {
    10: [W300, W301, tiny.EOS],
    11: [W300, W301, W302, W300],
    12: HELLO,
    13: [W300, tiny.BOS, W301, tiny.EOS],
}


@pytest.fixture(scope="module")
def llm(tiny_with_text):
    made = LLM(
        str(tiny_with_text),
        dtype="float32",
        device="cpu",
        kv_cache_memory_bytes=2**22,
        return_sampling_mask=True,
        logprobs_mode="processed_logprobs",
        logits_processors=[Script(SCRIPTS)],
    )
    yield made
    assert made.engine.stats().num_free_blocks == made.engine.stats().num_blocks


def run(llm, first, **params):
    params = {"max_tokens": 30, "logprobs": 0, "return_sampling_mask_logprobs": True, "seed": 1} | params
    (output,) = llm.generate({"prompt_token_ids": [first, 5, 6]}, SamplingParams(**params), use_tqdm=False)
    return checked(output).outputs[0]


def checked(output):
    """The output, if everything there is one of a token is there once a token."""
    for completion in output.outputs:
        size = len(completion.token_ids)
        assert len(completion.sampling_mask) == size
        assert completion.sampling_mask.contains(np.asarray(completion.token_ids)).all()
        assert len(completion.logprobs) == size
        assert all(
            next(iter(entry)) == drawn for entry, drawn in zip(completion.logprobs, completion.token_ids, strict=True)
        )
        assert sum(span.end - span.start for span in completion.weight_versions) == size
        total = sum(
            entry[drawn].logprob for entry, drawn in zip(completion.logprobs, completion.token_ids, strict=True)
        )
        assert completion.cumulative_logprob == pytest.approx(total, abs=1e-6)
    return output


# ---------------------------------------------------------------- endings


def test_a_sampled_eos_ends_the_completion_and_keeps_its_row(llm):
    output = run(llm, 10)
    assert output.token_ids == [W300, W301, tiny.EOS]
    assert output.sampling_mask.token_ids == [[W300], [W301], [tiny.EOS]]
    assert (output.finish_reason, output.stop_reason, output.text) == ("stop", None, "w300w301")


def test_a_stop_token_ends_the_completion_and_keeps_its_row(llm):
    output = run(llm, 11, stop_token_ids=[W302, W300 + 100])
    assert output.token_ids == [W300, W301, W302]
    assert (output.finish_reason, output.stop_reason, output.text) == ("stop", W302, "w300w301")
    assert run(llm, 11, stop_token_ids=[W302], include_stop_str_in_output=True).text == "w300w301w302"


@pytest.mark.parametrize("skip", [False, True])
def test_a_stop_string_that_is_one_special_token_is_its_id(llm, skip):
    output = run(llm, 13, stop=["<bos>", "w999"], skip_special_tokens=skip)
    assert output.token_ids == [W300, tiny.BOS]
    assert (output.finish_reason, output.stop_reason, output.text) == ("stop", "<bos>", "w300")
    output = run(llm, 13, stop="<bos>", skip_special_tokens=skip, include_stop_str_in_output=True)
    assert output.text == ("w300" if skip else "w300<bos>")
    # As a stop token it is not drawn before min_tokens are out.
    assert tiny.BOS not in run(llm, 20, stop="<bos>", min_tokens=30, ignore_eos=True).sampling_mask.ids


@pytest.mark.parametrize(("include", "text"), [(False, "w3"), (True, "w300w")])
def test_a_stop_string_that_ends_inside_a_token_keeps_the_whole_token(llm, include, text):
    output = run(llm, 11, stop=["nothing", "00w"], include_stop_str_in_output=include)
    assert output.token_ids == [W300, W301]
    assert (output.finish_reason, output.stop_reason, output.text) == ("stop", "00w", text)


def test_max_tokens_ends_the_completion(llm):
    output = run(llm, 11, max_tokens=2)
    assert output.token_ids == [W300, W301]
    assert (output.finish_reason, output.stop_reason, output.text) == ("length", None, "w300w301")


def test_a_stop_at_the_last_token_is_a_stop(llm):
    assert run(llm, 10, max_tokens=3).finish_reason == "stop"
    assert run(llm, 11, max_tokens=2, stop=["w301"]).stop_reason == "w301"


def test_without_max_tokens_the_context_is_filled(llm):
    assert llm.engine.max_model_len == tiny.MAX_MODEL_LEN
    prompt = {"prompt_token_ids": [20] * 250}
    (output,) = llm.generate(prompt, SamplingParams(max_tokens=None, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 6
    assert output.outputs[0].finish_reason == "length"
    assert output.sampling_params.max_tokens == 6


def test_ignore_eos_goes_on_after_it(llm):
    output = run(llm, 10, ignore_eos=True, max_tokens=5)
    assert output.token_ids[:3] == [W300, W301, tiny.EOS]
    assert (len(output.token_ids), output.finish_reason) == (5, "length")


def test_min_tokens_keeps_eos_and_stop_tokens_out_of_the_support_until_then(llm):
    ends = [tiny.EOS, 50]
    output = run(llm, 20, min_tokens=5, stop_token_ids=[50], logit_bias=dict.fromkeys(ends, 100.0))
    assert len(output.token_ids) == 6
    assert output.finish_reason == "stop"
    rows = output.sampling_mask.token_ids
    assert not any(set(ends) & set(row) for row in rows[:5])
    assert all(len(row) == tiny.VOCAB_SIZE - 2 for row in rows[:5])
    assert rows[5] == []


def test_min_tokens_lets_stop_strings_of_the_first_tokens_pass(llm):
    assert run(llm, 11, stop=["w300"], min_tokens=1).token_ids == [W300, W301, W302, W300]
    assert run(llm, 11, stop=["w301"], min_tokens=1).token_ids == [W300, W301]


def test_stop_strings_passed_over_are_passed_over_while_streaming_too(llm):
    params = SamplingParams(max_tokens=4, stop=["w300"], min_tokens=1, logprobs=0, return_sampling_mask_logprobs=True)
    for step in llm.stream({"prompt_token_ids": [11]}, params):
        last = checked(step).outputs[0]
    assert last.token_ids == [W300, W301, W302, W300]
    assert (last.text, last.stop_reason) == ("w300w301w302", "w300")


def test_an_aborted_completion_keeps_its_tokens_and_rows(llm):
    request = llm.engine.add("mine", [11, 5, 6], SamplingParams(max_tokens=4, n=2, logprobs=1))
    while len(request.completions[0].token_ids) < 3:
        llm.engine.step()
    assert llm.engine.abort(["mine", "unknown"]) == [request]
    output = checked(llm.engine.output(request))
    assert output.finished
    assert [completion.finish_reason for completion in output.outputs] == ["abort", "abort"]
    assert output.outputs[0].token_ids == [W300, W301, W302]
    assert output.outputs[0].text == "w300w301w302"
    assert llm.engine.num_unfinished == 0


# ---------------------------------------------------------------- text


def test_text_is_what_the_tokenizer_makes_of_the_tokens(llm):
    for seed in range(6):
        output = run(llm, 20, seed=seed, temperature=2.0, ignore_eos=True)
        assert output.text == TOKENIZER.decode(output.token_ids, skip_special_tokens=True)


def test_streamed_text_never_shows_half_a_character(llm):
    params = SamplingParams(max_tokens=len(HELLO))
    texts = [step.outputs[0].text for step in llm.stream({"prompt_token_ids": [12]}, params)]
    assert len(texts) == len(HELLO)
    assert texts[-1] == "hello 😀 there"
    assert all("hello 😀 there".startswith(text) for text in texts)


def test_special_tokens_show_only_on_request(llm):
    assert run(llm, 13).text == "w300w301"
    assert run(llm, 13, skip_special_tokens=False).text == "w300<bos>w301"
    assert run(llm, 13, skip_special_tokens=False, include_stop_str_in_output=True).text == "w300<bos>w301<eos>"


def test_no_text_is_made_where_none_is_wanted(llm):
    assert run(llm, 10, detokenize=False).text == ""


def test_without_a_tokenizer_there_is_no_text(tiny_llm):
    (output,) = tiny_llm().generate({"prompt_token_ids": [4]}, SamplingParams(max_tokens=2, logprobs=1), use_tqdm=False)
    assert output.outputs[0].text == ""
    assert len(output.outputs[0].token_ids) == 2
    assert {entry.decoded_token for row in output.outputs[0].logprobs for entry in row.values()} == {None}


# ---------------------------------------------------------------- chunks


@pytest.mark.parametrize("size", [1, 2, 7])
@pytest.mark.parametrize("case", ["length", "stop string", "stop token", "eos"])
def test_chunks_add_up_to_the_whole(llm, size, case):
    first, more = {
        "length": (20, {"max_tokens": 23, "temperature": 2.0, "ignore_eos": True}),
        "stop string": (11, {"stop": ["01w"]}),
        "stop token": (11, {"stop_token_ids": [W302]}),
        "eos": (13, {"skip_special_tokens": False}),
    }[case]
    params = SamplingParams(**{"seed": 3, "logprobs": 2, "return_sampling_mask_logprobs": True, "top_k": 30} | more)
    request = llm.engine.add("chunks", [first, 5, 6], params)
    completion = request.completions[0]
    chunks, num_tokens, num_characters = [], 0, 0
    while not request.finished:
        llm.engine.step()
        if len(completion.token_ids) - num_tokens >= size or request.finished:
            chunk = llm.engine.delta(completion, num_tokens, num_characters)
            assert 0 < len(chunk.token_ids) <= size
            assert len(chunk.token_ids) == len(chunk.sampling_mask) == len(chunk.logprobs)
            num_tokens, num_characters = num_tokens + len(chunk.token_ids), num_characters + len(chunk.text)
            chunks.append(chunk)
    (whole,) = checked(llm.engine.output(request)).outputs
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == whole.token_ids
    assert [entry for chunk in chunks for entry in chunk.logprobs] == whole.logprobs
    assert SamplingMask.concat([chunk.sampling_mask for chunk in chunks]) == whole.sampling_mask
    assert chunks[-1].cumulative_logprob == whole.cumulative_logprob
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == (whole.finish_reason, whole.stop_reason)
    for chunk in chunks:
        assert [tuple(span) for span in chunk.weight_versions] == [(0, len(chunk.token_ids), "default")]


def test_versions_cover_the_tokens_exactly(llm):
    request = llm.engine.add("versions", [20, 5], SamplingParams(max_tokens=7, ignore_eos=True))
    for version in "aabbbcc":
        llm.engine.weight_version = version
        llm.engine.step()
    llm.engine.weight_version = "default"
    (whole,) = llm.engine.output(request).outputs
    assert [tuple(span) for span in whole.weight_versions] == [(0, 2, "a"), (2, 5, "b"), (5, 7, "c")]
    chunk = llm.engine.delta(request.completions[0], 3, 0)
    assert [tuple(span) for span in chunk.weight_versions] == [(0, 2, "b"), (2, 4, "c")]


# ---------------------------------------------------------------- log-probs


def ranked(row):
    """Ids of a row by (value descending, id ascending)."""
    return np.lexsort((np.arange(row.size), -row)).tolist()


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"])
def test_each_request_gets_exactly_the_logprobs_it_asked_for(tiny_llm, tiny_checkpoint, mode):
    llm = tiny_llm(logprobs_mode=mode)
    prompt = {"prompt_token_ids": [9, 8, 7, 6]}
    asked = [5, None, 20, 0]
    params = [SamplingParams(max_tokens=6, seed=at, temperature=0.5, logprobs=k) for at, k in enumerate(asked)]
    for k, output in zip(asked, llm.generate([prompt] * 4, params, use_tqdm=False), strict=True):
        completion = output.outputs[0]
        if k is None:
            assert completion.logprobs is None
            assert completion.cumulative_logprob is None
            continue
        logits = plain.logits(tiny_checkpoint("llama"), output.prompt_token_ids + completion.token_ids)[3:-1]
        for row, drawn, entry in zip(logits, completion.token_ids, completion.logprobs, strict=True):
            row = row if mode.startswith("raw") else row / 0.5
            order = ranked(row)
            assert next(iter(entry)) == drawn
            assert set(entry) == {drawn, *order[:k]}
            assert [entry[token_id].rank for token_id in order if token_id in entry] == sorted(
                1 + order.index(token_id) for token_id in entry
            )
            values = log_softmax(row) if mode.endswith("logprobs") else row
            assert all(abs(values[token_id] - shown.logprob) < 1e-4 for token_id, shown in entry.items())


def test_more_logprobs_than_the_support_has_ids_are_as_many_as_there_are(llm):
    output = run(llm, 20, max_tokens=3, logprobs=20, top_k=4)
    for entry, row in zip(output.logprobs, output.sampling_mask.token_ids, strict=True):
        assert set(entry) == set(row)
        assert np.logaddexp.reduce([shown.logprob for shown in entry.values()]) == pytest.approx(0, abs=1e-6)


def test_entries_carry_the_text_of_their_token(llm):
    for entry in run(llm, 20, max_tokens=3, logprobs=5).logprobs:
        assert all(shown.decoded_token == TOKENIZER.decode([token_id]) for token_id, shown in entry.items())


def test_an_output_says_what_was_asked_and_which_seed_was_used(llm):
    (output,) = llm.generate("w300", SamplingParams(max_tokens=2, min_p=0.01), use_tqdm=False)
    assert output.prompt == "w300"
    assert output.prompt_token_ids == TOKENIZER.encode("w300")
    assert output.sampling_params == SamplingParams(max_tokens=2, min_p=0.01)
    assert output.finished
    (again,) = llm.generate("w300", output.sampling_params.replace(seed=output.seed), use_tqdm=False)
    assert again.outputs[0].token_ids == output.outputs[0].token_ids
    assert again.seed == output.seed
