"""What every backend of `Rollouts` does, each over the same checkpoint."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest
import safetensors.torch
import torch

import tiny
from keepmask import LLM, RequestError, SamplingParams
from keepmask.backends.base import Rollouts, weight_parts
from keepmask.backends.http import Client
from keepmask.backends.ray_rollouts import RayRollouts
from keepmask.backends.rollout_pool import RolloutPool
from server.serving import Serving

OPTIONS = {"skip_tokenizer_init": True, "return_sampling_mask": True, "logprobs_mode": "processed_logprobs"}
PARAMS = SamplingParams(n=2, max_tokens=8, top_k=6, ignore_eos=True, logprobs=0, seed=7)
PROMPTS = [[5, 6, 7], np.array([8, 9]), [10] * 20]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("served"), "llama")


RAY = pytest.param("RayRollouts", marks=[pytest.mark.slow, pytest.mark.filterwarnings("ignore")])


def engine(folder):
    return LLM(str(folder), dtype="float32", device="cpu", kv_cache_memory_bytes=2**22, **OPTIONS)


@pytest.fixture(scope="module", params=["LLM", "RolloutPool", RAY, "Client"])
def backend(request, folder):
    if request.param in ("LLM", "RolloutPool"):
        engines = [engine(folder)] if request.param == "LLM" else [engine(folder), engine(folder)]
        made = engines[0] if request.param == "LLM" else RolloutPool(engines)
        yield made
        made.close()
        assert not any(each.engine.num_unfinished for each in engines)
    elif request.param == "RayRollouts":
        ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'keepmask[ray]'")
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        with RayRollouts(
            partial(LLM, str(folder), dtype="float32", device="cpu", kv_cache_memory_bytes=2**22, **OPTIONS), 2
        ) as made:
            yield made
        ray.shutdown()
    else:
        with Serving(folder, engine=OPTIONS, api_keys=("key",), enable_weight_updates=True) as serving:
            made = Client(serving.url, api_key="key")
            yield made
            made.close()
            serving.settle()


@pytest.fixture(scope="module")
def reference(folder):
    return engine(folder)


def tokens(rollouts):
    return [rollout.token_ids.tolist() for rollout in rollouts]


def test_it_is_a_backend(backend):
    assert isinstance(backend, Rollouts)


def test_each_prompt_has_its_rollouts_with_masks_and_logprobs(backend, reference):
    each = [PARAMS.replace(seed=seed) for seed in range(3)]
    found = backend.rollouts(PROMPTS, each)
    for prompt, params, rollouts in zip(PROMPTS, each, found, strict=True):
        (expected,) = reference.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        assert tokens(rollouts) == [output.token_ids for output in expected.outputs]
        for rollout, output in zip(rollouts, expected.outputs, strict=True):
            assert rollout.prompt_token_ids.tolist() == list(prompt)
            assert rollout.sampling_mask.token_ids == output.sampling_mask.token_ids
            drawn = [entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids, strict=True)]
            np.testing.assert_allclose(rollout.logprobs, drawn, atol=1e-5)
            assert rollout.seed == params.seed
            assert [(span.start, span.end) for span in rollout.weight_versions] == [(0, 8)]
    assert backend.rollouts([], PARAMS) == []


def test_rollouts_come_as_they_finish(backend):
    lengths = [60, 2, 30]
    each = [PARAMS.replace(max_tokens=length) for length in lengths]
    order, found = zip(*backend.rollouts_as_finished(PROMPTS, each), strict=True)
    assert order == (1, 2, 0)
    assert [[len(rollout.token_ids) for rollout in rollouts] for rollouts in found] == [[2, 2], [30, 30], [60, 60]]
    whole = backend.rollouts(PROMPTS, each)
    assert [tokens(rollouts) for rollouts in found] == [tokens(whole[at]) for at in order]


def test_leaving_early_ends_the_others(backend):
    each = [PARAMS.replace(max_tokens=length) for length in (200, 2, 200)]
    stream = backend.rollouts_as_finished(PROMPTS, each)
    assert next(stream)[0] == 1
    stream.close()
    assert tokens(backend.rollouts(PROMPTS[:1], PARAMS)[0]) == tokens(backend.rollouts(PROMPTS, PARAMS)[0])


@pytest.mark.parametrize(
    ("prompts", "params", "param"),
    [
        ([[5], []], {}, None),
        ([[5], [tiny.VOCAB_SIZE]], {}, None),
        ([[5]], {"stop_token_ids": [tiny.VOCAB_SIZE]}, "stop_token_ids"),
    ],
)
def test_what_cannot_be_served_is_refused(backend, prompts, params, param):
    with pytest.raises(RequestError) as error:
        backend.rollouts(prompts, PARAMS.replace(**params))
    assert param is None or param in error.value.param


def test_parameters_can_be_resolved_beforehand(backend):
    params = PARAMS.replace(max_tokens=None)
    resolved = backend.resolved_params(PROMPTS[1], params)
    assert resolved == params.replace(max_tokens=tiny.MAX_MODEL_LEN - 2)
    assert backend.resolved_params(PROMPTS[1], PARAMS) == PARAMS


def test_new_weights_draw_from_then_on_under_their_name(backend, folder, tmp_path):
    old = safetensors.torch.load_file(folder / "model.safetensors")
    before = backend.rollouts(PROMPTS, PARAMS)
    new = {name: -tensor for name, tensor in old.items()}
    assert backend.update_weights(new, version="negated") == "negated" == backend.weight_version
    changed = backend.rollouts(PROMPTS, PARAMS)
    assert [tokens(rollouts) for rollouts in changed] != [tokens(rollouts) for rollouts in before]
    assert {span.version for span in itertools.chain(*(r.weight_versions for r in changed[0]))} == {"negated"}
    with pytest.raises(RequestError, match="missing"):
        backend.update_weights(dict(list(new.items())[:-1]))
    assert backend.weight_version == "negated"
    backend.update_weights(old, version="again")
    assert [tokens(each) for each in backend.rollouts(PROMPTS, PARAMS)] == [tokens(each) for each in before]


def test_weights_travel_in_parts_and_tied_ones_once(monkeypatch):
    monkeypatch.setattr("keepmask.backends.base._PART_BYTES", 100)
    shared = torch.arange(20.0)
    weights = {"a": shared, "b": torch.ones(30), "c": shared, "d": shared[:5], "e": torch.zeros(2, 2).T}
    parts = [safetensors.torch.load(part) for part in weight_parts(weights.items())]
    assert [sorted(part) for part in parts] == [["a", "b"], ["d", "e"]]
    assert all(torch.equal(part[name], weights[name]) for part in parts for name in part)
