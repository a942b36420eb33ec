from concurrent.futures import ThreadPoolExecutor

import pytest

import tiny
from keepmask import LLM, ConfigError, RequestError, SamplingParams

QUICK_START = """
from vllm import LLM, SamplingParams

prompts = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
llm = LLM(model="facebook/opt-125m")
outputs = llm.generate(prompts, sampling_params)
for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")

messages_list = [[{"role": "user", "content": prompt}] for prompt in prompts]
outputs = llm.chat(messages_list, sampling_params)
for idx, output in enumerate(outputs):
    prompt = prompts[idx]
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
"""
"""https://docs.vllm.ai/en/latest/getting_started/quickstart/"""

PARAMS = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)


@pytest.fixture(scope="module")
def make(tiny_with_text):
    return lambda **options: LLM(
        str(tiny_with_text), dtype="float32", device="cpu", **{"kv_cache_memory_bytes": 2**21} | options
    )


@pytest.fixture(scope="module")
def llm(make):
    return make()


@pytest.fixture(autouse=True)
def nothing_is_left(llm):
    yield
    assert llm.engine.num_unfinished == 0
    assert llm.engine.stats().num_free_blocks == llm.engine.stats().num_blocks


def generate(llm, prompts, params=PARAMS):
    return llm.generate(prompts, params, use_tqdm=False)


def drawn(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_vllms_quick_start_runs_with_the_import_changed(tiny_with_text, capsys):
    script = QUICK_START.replace("from vllm", "from keepmask").replace("facebook/opt-125m", str(tiny_with_text))
    exec(script, {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert lines[0].startswith("Prompt: 'Hello, my name is', Generated text: ")
    assert all(line.split("Generated text: ")[1] not in ("''", '""') for line in lines)


# ---------------------------------------------------------------- what generate takes


def test_prompts_come_as_text_or_token_ids_alone_or_in_lists(llm):
    ids = llm.get_tokenizer().encode("abc")
    given = ["abc", {"prompt": "abc"}, {"prompt_token_ids": ids}, {"prompt": "shown", "prompt_token_ids": ids}]
    together = generate(llm, given)
    assert drawn(together) == [drawn(generate(llm, prompt))[0] for prompt in given]
    assert drawn(together) == [together[0].outputs[0].token_ids] * 4
    assert [output.prompt for output in together] == ["abc", "abc", None, "shown"]
    assert [output.prompt_token_ids for output in together] == [ids] * 4
    assert drawn(generate(llm, tuple(given))) == drawn(together)
    assert generate(llm, []) == []


def test_outputs_come_in_the_order_of_the_prompts(llm):
    lengths = [9, 1, 5, 2, 7]
    outputs = generate(llm, ["w300"] * 5, [PARAMS.replace(max_tokens=length) for length in lengths])
    assert [len(token_ids) for token_ids in drawn(outputs)] == lengths
    assert len({output.request_id for output in outputs}) == 5


def test_without_params_the_defaults_hold(llm):
    (output,) = llm.generate("w300", use_tqdm=False)
    assert output.sampling_params == llm.get_default_sampling_params() == SamplingParams()


@pytest.mark.parametrize("use_tqdm", [True, False])
def test_nothing_is_printed_where_there_is_no_terminal(llm, capfd, use_tqdm):
    llm.generate(["w300"], PARAMS, use_tqdm)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("prompts", "param", "says"),
    [
        ("", "prompt", "is empty"),
        (["a", ""], "prompt", "is empty"),
        ({"prompt": ""}, "prompt", "is empty"),
        ({"text": "a"}, "prompt", "must be text, {'prompt': text} or {'prompt_token_ids': [...]}, got dict"),
        ({"prompt": "a", "multi_modal_data": {}}, "prompt", "unknown key 'multi_modal_data'; known are"),
        ({"prompt": "a", 3: 4, "b": 5}, "prompt", "unknown key 3"),
        ({"prompt": 7}, "prompt", "must be text, got int"),
        ({"prompt": ["a"]}, "prompt", "must be text, got list"),
        ({"prompt_token_ids": None}, "prompt_token_ids", "must be a list of integers"),
        ({"prompt_token_ids": [tiny.VOCAB_SIZE]}, "prompt_token_ids", "must be in [0, 512)"),
        ([1, 2, 3], "prompt", "got int"),
        ([["a"]], "prompt", "got list"),
        ([None], "prompt", "got NoneType"),
        (None, "prompts", "must be one or a list of them, got NoneType"),
        (7, "prompts", "got int"),
        ("half \ud83d", "prompt", "character 5 is half a surrogate pair"),
        ("a" * 300, "prompt", "maximum context length is 256 tokens, and the prompt has 300; shorten it"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused_before_anything_runs(llm, prompts, param, says):
    before = llm.engine.stats()
    with pytest.raises(RequestError) as error:
        generate(llm, prompts)
    assert error.value.param == param
    assert says in str(error.value)
    assert llm.engine.stats() == before


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ([PARAMS], "1 for 2 prompts; give one for all or one for each"),
        ([PARAMS] * 3, "3 for 2 prompts"),
        ({"n": 2}, "got dict"),
        ("greedy", "got str"),
        (7, "got int"),
        ([PARAMS, None], "got NoneType"),
    ],
)
def test_params_that_do_not_fit_the_prompts_are_refused(llm, params, says):
    with pytest.raises(RequestError, match="sampling_params") as error:
        generate(llm, ["a", "b"], params)
    assert error.value.param == "sampling_params"
    assert says in str(error.value)


def test_a_refused_call_changes_no_later_draw(make):
    params = PARAMS.replace(seed=None)
    expected = drawn(generate(make(), ["a", "b"], params))
    llm = make()
    for prompts, given in ((["a", ""], params), (["a", "b"], [params, params.replace(stop_token_ids=[9999])])):
        with pytest.raises(RequestError):
            generate(llm, prompts, given)
    assert drawn(generate(llm, ["a", "b"], params)) == expected


def test_a_completion_ends_where_the_context_is_full(llm):
    long = {"prompt_token_ids": [300] * 250}
    outputs = generate(llm, [long, "a"], PARAMS.replace(max_tokens=20))
    assert [len(token_ids) for token_ids in drawn(outputs)] == [6, 20]
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "length"]
    assert generate(llm, long, PARAMS.replace(max_tokens=20))[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids


def test_a_prompt_longer_than_the_context_is_refused_alone(make):
    llm = make(return_sampling_mask=True, logprobs_mode="processed_logprobs")
    params = PARAMS.replace(n=2, logprobs=0)
    short, long, other = generate(llm, ["a", {"prompt_token_ids": [300] * 256}, "b"], params)
    assert [len(each.token_ids) for each in (*short.outputs, *long.outputs, *other.outputs)] == [4, 4, 0, 0, 4, 4]
    assert drawn([short, other]) == drawn(generate(llm, ["a", "b"], params))
    assert long.finished
    assert len(long.prompt_token_ids) == 256
    for rollout in long.rollouts():
        assert rollout.finish_reason == "error"
        assert "maximum context length is 256 tokens, and the prompt has 256" in rollout.stop_reason
        assert len(rollout.sampling_mask) == len(rollout.logprobs) == 0


def test_threads_that_generate_at_once_get_what_each_gets_alone(llm):
    prompts = [[f"w{300 + 7 * thread + at}" for at in range(4)] for thread in range(4)]
    params = PARAMS.replace(max_tokens=24)
    alone = [drawn(generate(llm, each, params)) for each in prompts]
    steps = llm.engine.stats().num_steps
    with ThreadPoolExecutor(4) as pool:
        together = [drawn(outputs) for outputs in pool.map(lambda each: generate(llm, each, params), prompts)]
    assert together == alone
    # In one batch: had they taken turns, it would be 4 * 24 steps.
    assert llm.engine.stats().num_steps - steps < 60


def test_threads_may_stream_and_update_weights_while_others_generate(llm):
    params = PARAMS.replace(max_tokens=40)
    expected = drawn(generate(llm, "a", params))
    weights = llm.engine.weights()
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(lambda: drawn(list(llm.stream("a", params))[-1:])) for _ in range(2)]
        jobs += [pool.submit(lambda: drawn(generate(llm, "a", params)))]
        updates = [pool.submit(llm.update_weights, weights) for _ in range(3)]
        assert [job.result() for job in jobs] == [expected] * 3
        assert len({update.result() for update in updates}) == 3


def test_an_interrupt_ends_every_request_of_the_call(llm, monkeypatch):
    steps = iter([llm.engine.runner.forward] * 2)

    def forward(*args):
        for working in steps:
            return working(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine.runner, "forward", forward)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], PARAMS.replace(n=2))


def test_without_a_tokenizer_text_is_refused(make):
    llm = make(skip_tokenizer_init=True)
    with pytest.raises(ConfigError, match="skip_tokenizer_init=True: this engine has no tokenizer"):
        generate(llm, "a")
    assert generate(llm, {"prompt_token_ids": [4]})[0].outputs[0].text == ""


def test_unknown_options_are_refused():
    with pytest.raises(ConfigError, match="max_seqs: unknown engine option; known are ban_unmapped_token_ids"):
        LLM("smollm2-135m", max_seqs=4)


# ---------------------------------------------------------------- chat


def test_a_conversation_is_rendered_with_the_models_template(llm):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    text = "<bos>user: hi<eos><bos>assistant: yo<eos>"
    (output,) = llm.chat(messages, PARAMS, use_tqdm=False)
    assert output.prompt == text + "<bos>assistant: "
    assert output.prompt_token_ids == llm.get_tokenizer().encode(output.prompt, add_special_tokens=False)
    assert output.prompt_token_ids.count(tiny.BOS) == 3
    (plain,) = llm.chat(messages, PARAMS, use_tqdm=False, add_generation_prompt=False)
    assert plain.prompt == text
    assert drawn(llm.chat([messages, messages[:1]], PARAMS, False))[0] == output.outputs[0].token_ids
    assert llm.chat([], PARAMS, use_tqdm=False) == []


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([{"role": "wizard", "content": "hi"}], "the chat template refused them: no such role"),
        ("hi", "must be a list of {'role': ..., 'content': ...}, got str"),
        ({"role": "user", "content": "hi"}, "got dict"),
        ([7], "must be a list of {'role': ..., 'content': ...}, got int"),
        (["hi"], "got str"),
        ([[7]], "messages[0]: must be {'role': ..., 'content': ...}, got int"),
    ],
)
def test_messages_that_are_no_conversation_are_refused(llm, messages, says):
    with pytest.raises(RequestError) as error:
        llm.chat(messages, PARAMS, use_tqdm=False)
    assert error.value.param == "messages"
    assert says in str(error.value)


def test_a_conversation_may_end_in_the_middle_of_a_message(llm):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [{"type": "text", "text": "yo"}]}]
    (output,) = llm.chat(messages, PARAMS, False, add_generation_prompt=False, continue_final_message=True)
    assert output.prompt == "<bos>user: hi<eos><bos>assistant: yo"


def test_a_model_without_a_chat_template_says_so(make):
    llm = make()
    llm.get_tokenizer().chat_template = None
    with pytest.raises(RequestError, match="chat_template is not set"):
        llm.chat([{"role": "user", "content": "hi"}], use_tqdm=False)


# ---------------------------------------------------------------- stream


def test_a_stream_is_refused_when_it_is_asked_for(llm):
    with pytest.raises(RequestError):
        llm.stream("")


def test_a_stream_that_nobody_reads_asks_nothing_of_the_engine(llm):
    llm.stream("a", PARAMS)


def test_a_stream_closed_early_ends_its_request(llm):
    stream = llm.stream("a", PARAMS.replace(n=2))
    assert not next(stream).finished
    assert llm.engine.num_unfinished == 1
    stream.close()


def test_a_stream_goes_on_while_others_generate(llm):
    expected = drawn(generate(llm, "a"))[0]
    stream = llm.stream("a", PARAMS)
    seen = [next(stream)]
    generate(llm, "b", PARAMS.replace(max_tokens=20))
    assert llm.engine.num_unfinished == 0
    seen += stream
    assert seen[-1].finished
    assert drawn(seen) == [expected[:1], expected]


def test_two_streams_take_turns(llm):
    expected = drawn(generate(llm, ["a", "b"]))
    streams = {prompt: llm.stream(prompt, PARAMS) for prompt in "ab"}
    last = {}
    while len(streams) > sum(output.finished for output in last.values()):
        for prompt, stream in streams.items():
            last[prompt] = next(stream, last.get(prompt))
    assert drawn(last.values()) == expected


def test_closing_ends_the_calls_of_other_threads_with_what_they_have(tiny_checkpoint):
    llm = LLM(str(tiny_checkpoint("llama")), skip_tokenizer_init=True, dtype="float32", kv_cache_memory_bytes=2**22)
    params = SamplingParams(max_tokens=200, ignore_eos=True, n=2)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(llm.generate, {"prompt_token_ids": [5, 6 + at]}, params, False) for at in range(2)]
        while llm.engine.stats().num_generated_tokens < 8:
            pass
        llm.close()
        for call in calls:
            (output,) = call.result(timeout=60)
            assert {one.finish_reason for one in output.outputs} == {"abort"}
            assert all(len(one.token_ids) < 200 for one in output.outputs)
