"""Actors on a local Ray cluster: deaths, returns, weights, arrays. Needs ray, which is no dependency of the checks."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from functools import partial

import numpy as np
import pytest
import safetensors.torch

import tiny
from keepmask import LLM, RequestError, SamplingParams
from keepmask.backends.base import Rollouts
from keepmask.backends.ray_rollouts import RayRollouts
from keepmask.mask import SamplingMask
from server.serving import until

OPTIONS = {
    "dtype": "float32",
    "device": "cpu",
    "kv_cache_memory_bytes": 2**22,
    "skip_tokenizer_init": True,
    "return_sampling_mask": True,
    "logprobs_mode": "processed_logprobs",
}
PARAMS = SamplingParams(n=2, max_tokens=100, top_k=6, ignore_eos=True, logprobs=0)
PROMPTS = [[number, 6, 7] for number in range(3, 35)]

needs_ray = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # ray's own: it forks, and leaves sockets open
]


def seeded(params=PARAMS):
    return [params.replace(seed=seed) for seed in range(len(PROMPTS))]


def tokens(rollouts):
    return [rollout.token_ids.tolist() for rollout in rollouts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("served"), "llama")


@pytest.fixture(scope="module")
def reference(folder):
    return LLM(str(folder), **OPTIONS)


@pytest.fixture(scope="module")
def actors(folder):
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'keepmask[ray]'")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    group = ray.util.placement_group([{"CPU": 1}, {"CPU": 1}])
    ray.get(group.ready())
    with RayRollouts(partial(LLM, str(folder), **OPTIONS), 2, placement_group=group, concurrency=12, seed=1) as actors:
        yield actors
    ray.shutdown()


def kill(actors, number):
    import ray

    pid = ray.get(actors._members[number].backend.handle.__ray_call__.remote(lambda _: os.getpid()))
    os.kill(pid, signal.SIGKILL)


class TestOnACluster:
    pytestmark = needs_ray

    def test_an_actor_that_dies_in_mid_rollout_loses_and_doubles_nothing(self, actors, reference):
        assert isinstance(actors, Rollouts)
        stream = actors.rollouts_as_finished(PROMPTS, seeded())
        found = [next(stream)]
        kill(actors, 0)
        found += list(stream)
        assert sorted(at for at, _ in found) == list(range(len(PROMPTS)))
        expected = reference.rollouts(PROMPTS, seeded())
        assert [tokens(rollouts) for _, rollouts in sorted(found)] == [tokens(each) for each in expected]
        for at, rollouts in found:
            for rollout, truth in zip(rollouts, expected[at], strict=True):
                assert rollout.sampling_mask.token_ids == truth.sampling_mask.token_ids
                np.testing.assert_allclose(rollout.logprobs, truth.logprobs, atol=1e-5)
        until(lambda: actors.num_serving == 2, timeout_s=120)
        assert actors._members[0].backend.weight_version == actors.weight_version == reference.weight_version

    def test_an_actor_started_anew_serves_with_the_weights_pushed_before(self, actors, reference, folder):
        new = {name: -value for name, value in safetensors.torch.load_file(folder / "model.safetensors").items()}
        assert actors.update_weights(new, version="negated") == "negated"
        kill(actors, 1)
        with pytest.raises(RequestError, match="missing"):
            actors.update_weights(dict(list(new.items())[:-1]))
        found = actors.rollouts(PROMPTS, seeded())
        until(lambda: actors.num_serving == 2, timeout_s=120)
        again = actors._members[1].backend
        assert again.weight_version == "negated"
        reference.update_weights(new, version="negated")
        assert again.weight_checksums() == reference.weight_checksums()
        expected = [tokens(each) for each in reference.rollouts(PROMPTS, seeded())]
        assert [tokens(each) for each in found] == expected
        assert [tokens(each) for each in again.rollouts(PROMPTS, seeded())] == expected
        assert {span.version for (rollout, _) in found for span in rollout.weight_versions} == {"negated"}

    def test_refusals_cross_with_their_field(self, actors):
        with pytest.raises(RequestError) as error:
            actors.rollouts([[5]], PARAMS.replace(stop_token_ids=[tiny.VOCAB_SIZE]))
        assert "stop_token_ids" in error.value.param
        assert actors.num_serving == 2

    def test_prompts_without_seeds_draw_differently_everywhere(self, actors):
        found = actors.rollouts([[5, 6, 7]] * 8, PARAMS)
        assert len({str(tokens(rollouts)) for rollouts in found}) == 8


def test_rollouts_cross_as_arrays(reference):
    (rollouts,) = reference.rollouts([[5, 6, 7]], PARAMS.replace(seed=1, top_k=200))
    buffers: list = []
    inline = pickle.dumps(rollouts, protocol=5, buffer_callback=buffers.append)
    carried = sum(buffer.raw().nbytes for buffer in buffers)
    assert carried >= sum(rollout.sampling_mask.nbytes for rollout in rollouts) > 10 * len(inline)
    frozen = [bytes(buffer.raw()) for buffer in buffers]  # as the object store gives them: read-only
    again = pickle.loads(inline, buffers=frozen)
    assert again == rollouts
    assert isinstance(again[0].sampling_mask, SamplingMask)
    assert not again[0].sampling_mask.ids.flags.owndata


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r"keepmask\[ray\]"):
        RayRollouts(partial(LLM, "nowhere"), 1)
