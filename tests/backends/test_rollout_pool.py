"""Several backends as one: shares, failures, returns, weights."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from keepmask import BackendError, ConfigError, RequestError, SamplingParams
from keepmask.backends.base import Rollouts
from keepmask.backends.rollout_pool import KeptWeights, RolloutPool
from keepmask.engine.weights import checksum
from keepmask.outputs import Rollout
from server.serving import until

PARAMS = SamplingParams(max_tokens=4)
OLD = {"w": torch.arange(4.0), "b": torch.ones(2)}
NEW = {"w": torch.arange(4.0) + 1, "b": torch.zeros(2)}


class Member:
    """Draws its prompt back, with the request's seed behind it. `gate` holds every draw until it is set."""

    def __init__(self, weights=OLD):
        self.weights, self.weight_version = dict(weights), "0"
        self.drawn, self.pushes = [], 0
        self.gate = threading.Event()
        self.gate.set()
        self.failing: Exception | None = None
        self.corrupt = self.closed = False

    def rollouts(self, prompts, params):
        ((prompt,), (own,)) = prompts, params
        self.drawn.append(prompt[0])
        assert self.gate.wait(20)
        if self.failing:
            raise self.failing
        if prompt[0] < 0:
            raise RequestError("negative", param="token_ids")
        ids = np.asarray([*prompt, own.seed % 1000], np.int32)
        return [[Rollout(prompt_token_ids=np.asarray(prompt, np.int32), token_ids=ids, request_id=self.weight_version)]]

    def rollouts_as_finished(self, prompts, params):
        raise NotImplementedError

    def resolved_params(self, prompt, params):
        return params.replace(max_tokens=len(prompt))

    def update_weights(self, weights, *, version=None):
        if set(weights) != set(OLD):
            raise RequestError("missing weights")
        if self.failing:
            raise self.failing
        self.pushes += 1
        self.weights = {name: value * 2 if self.corrupt else value.clone() for name, value in weights.items()}
        self.weight_version = version or str(int(self.weight_version) + 1)
        return self.weight_version

    def weight_checksums(self):
        if self.failing:
            raise self.failing
        return {name: checksum(value) for name, value in self.weights.items()}

    def close(self):
        self.closed = True


@pytest.fixture
def members():
    return [Member(), Member(), Member()]


@pytest.fixture
def pool(members, monkeypatch):
    monkeypatch.setattr("keepmask.backends.rollout_pool._FIRST_WAIT_S", 0.01)
    monkeypatch.setattr("keepmask.backends.rollout_pool._LONGEST_WAIT_S", 0.02)
    with RolloutPool(members, concurrency=4, patience_s=0.2, seed=5) as pool:
        yield pool
        for member in members:
            member.gate.set()
    assert all(member.closed for member in members)


def prompts(count):
    return [[number, 7] for number in range(count)]


def meets_all(pool, members):
    """Draw so many prompts at once that every serving member has some under way."""
    for member in members:
        member.gate.clear()
    before = sum(len(member.drawn) for member in members)
    reader = threading.Thread(target=lambda: pool.rollouts(prompts(12), PARAMS))
    reader.start()
    until(lambda: sum(len(member.drawn) for member in members) == before + 12)
    for member in members:
        member.gate.set()
    reader.join()


def drawn(found):
    return [rollout.token_ids.tolist()[0] for (rollout,) in found]


def test_a_pool_is_a_backend_and_shares_the_prompts_evenly(pool, members):
    assert isinstance(pool, Rollouts)
    for member in members:
        member.gate.clear()
    stream = pool.rollouts_as_finished(prompts(30), PARAMS)
    first = threading.Thread(target=lambda: found.append(next(stream)))
    found: list = []
    first.start()
    until(lambda: sum(len(member.drawn) for member in members) == 12)  # four at each of three, and no more
    assert [len(member.drawn) for member in members] == [4, 4, 4]
    members[1].gate.set()  # the fast one draws what the slow ones have no room for
    first.join()
    found += [next(stream) for _ in range(21)]
    assert len(members[1].drawn) == 22
    members[0].gate.set()
    members[2].gate.set()
    found += list(stream)
    assert sorted(at for at, _ in found) == list(range(30))
    assert all(rollouts[0].token_ids[0] == at for at, rollouts in found)


def test_every_prompt_has_a_seed_of_its_own_and_a_given_one_stays(pool, members):
    seeds = [rollout.token_ids[-1] for (rollout,) in pool.rollouts([[1, 2]] * 20, PARAMS)]
    assert len(set(seeds)) > 15
    assert [rollout.token_ids[-1] for (rollout,) in pool.rollouts([[1]] * 3, PARAMS.replace(seed=8))] == [8, 8, 8]
    again = [Member(), Member()]
    with RolloutPool(again, seed=5) as other:
        assert [rollout.token_ids[-1] for (rollout,) in other.rollouts([[1, 2]] * 20, PARAMS)] == seeds


def test_what_a_failing_member_had_under_way_is_drawn_by_others_once(pool, members):
    for member in members:
        member.gate.clear()
    members[0].failing = BackendError("died")
    found: list = []
    reader = threading.Thread(target=lambda: found.extend(pool.rollouts_as_finished(prompts(20), PARAMS)))
    reader.start()
    until(lambda: len(members[0].drawn) == 4)
    for member in members:
        member.gate.set()
    reader.join()
    assert sorted(at for at, _ in found) == list(range(20))
    assert sorted(members[1].drawn + members[2].drawn) == list(range(20))
    assert pool.num_serving == 2
    members[0].failing = None
    until(lambda: pool.num_serving == 3)
    assert members[0].pushes == 0  # it still held the right weights


def test_a_second_try_has_the_seed_of_the_first(members):
    with RolloutPool([Member()], seed=3) as pool:
        expected = pool.rollouts(prompts(6), PARAMS)
    healthy = [Member(), members[1]]
    with RolloutPool(healthy, seed=3) as pool:
        healthy[0].failing = BackendError("died")
        assert pool.rollouts(prompts(6), PARAMS) == expected


def test_a_member_that_lost_its_weights_serves_after_they_are_pushed_and_verified(pool, members):
    trainers = {name: value.clone() for name, value in NEW.items()}
    assert pool.update_weights(trainers, version="new") == "new" == pool.weight_version
    trainers["w"] += 100  # the trainer goes on; the pool's copy stays
    members[2].failing = BackendError("died")
    meets_all(pool, members)
    until(lambda: pool.num_serving == 2)
    members[2].weights, members[2].weight_version = dict(OLD), "0"  # restarted from its checkpoint
    members[2].corrupt, members[2].failing = True, None
    until(lambda: members[2].pushes > 2)
    assert pool.num_serving == 2  # what arrived is not what was sent
    members[2].corrupt = False
    until(lambda: pool.num_serving == 3)
    assert torch.equal(members[2].weights["w"], NEW["w"])
    assert {rollout.request_id for (rollout,) in pool.rollouts(prompts(9), PARAMS)} == {"new"}


def test_the_last_member_is_verified_against_the_kept_weights(monkeypatch):
    monkeypatch.setattr("keepmask.backends.rollout_pool._FIRST_WAIT_S", 0.01)
    member = Member()
    with RolloutPool([member], attempts=2, patience_s=20) as pool:
        pool.update_weights(NEW)
        member.failing = BackendError("died")
        threading.Timer(0.2, lambda: setattr(member, "failing", None)).start()
        member.weights, member.weight_version = dict(OLD), "0"
        assert drawn(pool.rollouts(prompts(3), PARAMS)) == [0, 1, 2]  # they wait for it
        assert member.weight_version == "1"
        assert torch.equal(member.weights["b"], NEW["b"])


def test_members_that_a_pool_makes_are_closed_when_they_do_not_verify(monkeypatch):
    monkeypatch.setattr("keepmask.backends.rollout_pool._FIRST_WAIT_S", 0.01)
    made: list[Member] = []

    class Making(RolloutPool):
        def _renewed(self, number, backend):
            made.append(Member(NEW if len(made) < 2 else OLD))  # the first two start from other weights
            return made[-1]

    member = Member()
    member.failing = BackendError("died")
    member.weight_checksums = lambda: KeptWeights(OLD).checksums()
    with Making([member], patience_s=20) as pool:
        assert drawn(pool.rollouts(prompts(3), PARAMS)) == [0, 1, 2]
        assert [each.closed for each in made] == [True, True, False]
    assert made[2].closed


def test_members_that_fail_an_update_catch_up(pool, members):
    members[0].failing = members[1].failing = BackendError("gone")
    assert pool.update_weights(NEW) == "1"
    assert pool.num_serving == 1
    members[0].failing = members[1].failing = None
    until(lambda: pool.num_serving == 3)
    assert [member.weight_version for member in members] == ["1", "1", "1"]
    with pytest.raises(RequestError, match="missing"):
        pool.update_weights({"w": NEW["w"]})
    assert pool.weight_version == "1"
    assert pool.num_serving == 3
    assert pool.weight_checksums() == KeptWeights(NEW).checksums()


def test_a_refused_prompt_is_not_tried_again(pool, members):
    with pytest.raises(RequestError, match="negative"):
        pool.rollouts([[-1]], PARAMS)
    assert sum(len(member.drawn) for member in members) == 1
    assert pool.num_serving == 3
    with pytest.raises(RequestError, match="2 for 1 prompts"):
        pool.rollouts([[1]], [PARAMS] * 2)


def test_failures_everywhere_are_raised_with_their_reason(pool, members):
    for member in members:
        member.failing = BackendError("out of memory")
    with pytest.raises(BackendError, match="out of memory"):
        pool.rollouts([[1]], PARAMS)
    with pytest.raises(BackendError, match=r"no member (served|took).*out of memory"):
        pool.update_weights(NEW)
    assert pool.num_serving == 0


def test_leaving_early_begins_nothing_more(pool, members):
    stream = pool.rollouts_as_finished(prompts(200), PARAMS)
    members[0].gate.clear()
    next(stream)
    stream.close()
    begun = sum(len(member.drawn) for member in members)
    time.sleep(0.05)
    assert begun <= sum(len(member.drawn) for member in members) <= begun + 12
    members[0].gate.set()
    assert drawn(pool.rollouts(prompts(3), PARAMS)) == [0, 1, 2]
    assert pool.resolved_params([1, 2, 3], PARAMS).max_tokens == 3


def test_members_must_be_alike_and_tell_their_weights():
    with pytest.raises(ConfigError, match=r"members\[1\]: 2 weights have another checksum"):
        RolloutPool([Member(), Member(NEW)])
    with pytest.raises(ConfigError, match=r"members\[0\]: object lacks"):
        RolloutPool([object()])
    with pytest.raises(ConfigError, match="members=0"):
        RolloutPool([])


def test_kept_weights_are_copies_and_tied_ones_are_kept_once():
    shared = torch.ones(3)
    kept = KeptWeights({"a": shared, "b": shared, "c": torch.zeros(1)})
    shared += 1
    assert sorted(kept) == ["a", "c"]
    assert kept["a"].tolist() == [1, 1, 1]
