import asyncio
import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import tiny
from keepmask import LLM, AsyncLLM, EngineError, RequestError, SamplingMask, SamplingParams

OPTIONS = {
    "dtype": "float32",
    "device": "cpu",
    "kv_cache_memory_bytes": 2**22,
    "return_sampling_mask": True,
    "logprobs_mode": "processed_logprobs",
}
PARAMS = SamplingParams(max_tokens=12, seed=1, ignore_eos=True, top_k=20, logprobs=1)
LONG = PARAMS.replace(max_tokens=200)


@pytest.fixture(scope="module")
def folder(tiny_with_text):
    return str(tiny_with_text)


@pytest.fixture
def llm(folder):
    with AsyncLLM(folder, **OPTIONS) as made:
        yield made
        limit = time.monotonic() + 10
        while made.is_running and made._engine.num_unfinished:  # aborts reach the engine between two steps
            assert time.monotonic() < limit
            time.sleep(0.001)


@pytest.fixture(scope="module")
def expected(folder):
    """expected(prompt, params): what `LLM.generate` makes of it."""
    offline = LLM(folder, **OPTIONS)
    return lambda prompt, params=PARAMS: offline.generate(prompt, params, use_tqdm=False)[0]


async def outputs(llm, prompt, request_id="r", params=PARAMS, **options):
    return [output async for output in llm.generate(prompt, params, request_id, **options)]


async def last(*args, **options):
    return (await outputs(*args, **options))[-1]


def same(output, other):
    """Whether two outputs hold the same completions."""
    fields = ("index", "text", "token_ids", "logprobs", "sampling_mask", "finish_reason", "weight_versions")
    return output.finished and all(
        getattr(one, name) == getattr(two, name)
        for one, two in zip(output.outputs, other.outputs, strict=True)
        for name in fields
    )


def test_many_callers_get_what_each_gets_alone_and_share_the_steps(llm, expected):
    async def run():
        return await asyncio.gather(*(last(llm, f"w{300 + at}", f"r{at}") for at in range(16)))

    for at, output in enumerate(asyncio.run(run())):
        assert output.request_id == f"r{at}"
        assert same(output, expected(f"w{300 + at}"))
    assert llm.stats().num_steps < 3 * 12


def test_outputs_hold_everything_so_far(llm, expected):
    params = PARAMS.replace(n=2, prompt_logprobs=1)
    seen = asyncio.run(outputs(llm, "a", params=params))
    assert same(seen[-1], expected("a", params))
    assert seen[-1].prompt_logprobs == expected("a", params).prompt_logprobs
    assert [output.finished for output in seen] == [False] * (len(seen) - 1) + [True]
    for earlier, later in itertools.pairwise(seen):
        for one, two in zip(earlier.outputs, later.outputs, strict=True):
            assert two.token_ids[: len(one.token_ids)] == one.token_ids
            assert len(one.sampling_mask) == len(one.logprobs) == len(one.token_ids)


def test_deltas_add_up_to_the_whole(llm, expected):
    whole = expected("a", PARAMS.replace(n=2))
    seen = asyncio.run(outputs(llm, "a", params=PARAMS.replace(n=2), output_kind="delta"))
    for completion in whole.outputs:
        parts = [part for output in seen for part in output.outputs if part.index == completion.index]
        assert [token_id for part in parts for token_id in part.token_ids] == completion.token_ids
        assert "".join(part.text for part in parts) == completion.text
        assert SamplingMask.concat(part.sampling_mask for part in parts) == completion.sampling_mask
        assert parts[-1].finish_reason == completion.finish_reason
    assert {(output.seed, output.sampling_params.max_tokens) for output in seen} == {(1, 12)}


def test_the_final_output_alone_comes_once(llm, expected):
    (output,) = asyncio.run(outputs(llm, {"prompt_token_ids": [300, 301]}, output_kind="final_only"))
    assert same(output, expected({"prompt_token_ids": [300, 301]}))


def test_an_aborted_request_ends_with_what_it_has(llm, expected):
    async def run():
        seen = []
        async for output in llm.generate("a", LONG, "r"):
            seen.append(output)
            if len(seen) == 2:
                await llm.abort(["r", "unknown"])
        return seen[-1].outputs[0]

    completion = asyncio.run(run())
    size = len(completion.token_ids)
    assert (completion.finish_reason, size < 200) == ("abort", True)
    assert completion.token_ids == expected("a", LONG).outputs[0].token_ids[:size]
    assert len(completion.sampling_mask) == size


def test_leaving_early_ends_the_request(llm):
    async def run():
        stream = llm.generate("a", LONG, "r")
        await anext(stream)
        await stream.aclose()
        task = asyncio.create_task(last(llm, "b", params=LONG))
        while not llm._tickets:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return await last(llm, "c")  # under the same name: it is free again

    assert asyncio.run(run()).finished
    assert llm._tickets == {}


@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_a_pause_changes_no_draw(llm, expected, mode):
    async def run():
        task = asyncio.create_task(last(llm, "a", "r", PARAMS))
        await asyncio.sleep(0.01)
        assert await llm.pause_generation(mode=mode)
        assert await llm.is_paused()
        late = asyncio.create_task(last(llm, "b", "late"))
        steps = llm.stats().num_steps
        await asyncio.sleep(0.05)
        assert llm.stats().num_steps == steps
        assert not late.done()
        await llm.resume_generation()
        assert not await llm.is_paused()
        return await asyncio.gather(task, late)

    first, late = asyncio.run(run())
    assert same(first, expected("a"))
    assert same(late, expected("b"))


def test_a_pause_that_aborts_ends_every_request(llm):
    async def run():
        tasks = [asyncio.create_task(last(llm, "a", f"r{at}", LONG)) for at in range(3)]
        while len(llm._tickets) < 3:
            await asyncio.sleep(0)
        await llm.pause_generation()
        done = await asyncio.gather(*tasks)
        await llm.resume_generation()
        return done

    assert [output.outputs[0].finish_reason for output in asyncio.run(run())] == ["abort"] * 3


def test_weights_change_in_mid_generation_and_the_spans_say_where(llm, folder):
    async def run():
        stream = llm.generate("a", PARAMS.replace(max_tokens=100), "r")
        before = len((await anext(stream)).outputs[0].token_ids)
        version = await llm.update_weights(folder)
        assert version == await llm.get_weight_version() == "1"
        (*_, output) = [output async for output in stream]
        return before, output.outputs[0]

    before, completion = asyncio.run(run())
    first, second = completion.weight_versions
    assert (first.start, first.version, second.version, second.end) == (0, "default", "1", 100)
    assert before <= first.end == second.start


@pytest.mark.parametrize(
    ("prompt", "params", "options", "param"),
    [
        ("", {}, {}, "prompt"),
        ({"prompt_token_ids": [300] * 256}, {}, {}, "prompt"),
        ({"prompt_token_ids": [tiny.VOCAB_SIZE]}, {}, {}, "prompt_token_ids"),
        ("a", {"stop_token_ids": [9999]}, {}, "stop_token_ids"),
        ("a", {}, {"output_kind": "some"}, "output_kind"),
        ("a", {"prompt_logprobs": 0}, {"output_kind": "delta"}, "prompt_logprobs"),
    ],
)
def test_what_cannot_be_served_is_refused_by_field(llm, prompt, params, options, param):
    with pytest.raises(RequestError) as error:
        asyncio.run(outputs(llm, prompt, "r", PARAMS.replace(**params), **options))
    assert error.value.param == param
    assert llm._tickets == {}


def test_a_name_is_taken_until_its_request_ends(llm):
    async def run():
        stream = llm.generate("a", LONG, "r")
        await anext(stream)
        with pytest.raises(RequestError, match="in use by an unfinished request"):
            await outputs(llm, "b")
        await stream.aclose()

    asyncio.run(run())


def test_max_tokens_beyond_the_context_fill_it(llm):
    output = asyncio.run(last(llm, {"prompt_token_ids": [300] * 250}, params=LONG))
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (6, "length")


def test_a_failed_engine_tells_everybody(llm, monkeypatch):
    def forward(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(llm._engine.runner, "forward", forward)
    with pytest.raises(EngineError, match="RuntimeError: out of memory"):
        asyncio.run(outputs(llm, "a"))
    assert (llm.errored, llm.is_running) == (True, False)
    for call in (outputs(llm, "b"), llm.check_health(), llm.reset_prefix_cache()):
        with pytest.raises(EngineError, match="out of memory"):
            asyncio.run(call)


def test_callers_may_have_event_loops_of_their_own(llm, expected):
    with ThreadPoolExecutor(4) as pool:
        loops = [pool.submit(lambda at: asyncio.run(last(llm, "a", f"r{at}")), at) for at in range(4)]
        assert all(same(loop.result(), expected("a")) for loop in loops)


def test_shutdown_fails_what_is_under_way(folder):
    llm = AsyncLLM(folder, **OPTIONS)

    async def run():
        task = asyncio.create_task(last(llm, "a", params=LONG.replace(n=16)))
        while not llm._tickets:
            await asyncio.sleep(0)
        await asyncio.to_thread(llm.shutdown)
        await task

    with pytest.raises(EngineError, match="the engine was stopped"):
        asyncio.run(run())
