"""A model somebody else runs is made to have a chosen distribution."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import oracle
from keepmask.conform.forcing import NotForcedError, force, lifted, ties_hold
from keepmask.conform.json_client import JsonClient
from keepmask.conform.mask_routes import SglangRoute, VllmRoute
from keepmask.conform.probes import PROBES
from oracle_server import OracleServer, logits

PROMPT = (72, 101, 108, 112)
BY_NAME = {probe.name: probe for probe in PROBES}


def likeliest(n, context=PROMPT):
    return tuple(sorted(np.argsort(-logits(context))[:n].tolist()))


def biased(bias, context=PROMPT):
    """[V] float32: what the engine samples from."""
    return oracle.logit_bias(logits(context), bias)


@pytest.mark.parametrize("route_type", [VllmRoute, SglangRoute])
@pytest.mark.parametrize("name", ["top_k", "top_k_then_top_p", "top_p_first", "temperature_bias"])
def test_the_handful_has_the_wanted_probabilities_and_all_else_less_than_a_millionth(name, route_type):
    probe = BY_NAME[name]
    ids = likeliest(len(probe.wanted))
    with OracleServer() as server, JsonClient(server.url) as client:
        bias = force(route_type(client, PROMPT), PROMPT, ids, probe)
    probabilities = np.exp(oracle.log_softmax(biased(bias)))
    np.testing.assert_allclose(probabilities[list(ids)], probe.wanted, rtol=1e-4)
    assert 1 - probabilities[list(ids)].sum() < 1e-6
    assert all(-100 <= value <= 100 for value in bias.values())
    assert (biased(bias)[list(ids)] > 20).all()


@pytest.mark.parametrize("context", [(*PROMPT, n) for n in range(4)])
@pytest.mark.parametrize("name", ["top_k_nine_tied", "top_p_boundary", "greedy_tie", "top_k_then_top_p_tie"])
def test_ties_are_equal_to_the_bit(name, context):
    probe = BY_NAME[name]
    ids = likeliest(len(probe.wanted), context)
    with OracleServer() as server, JsonClient(server.url) as client:
        route = VllmRoute(client, PROMPT)
        bias = force(route, context, ids, probe)
        assert ties_hold(route, context, bias, ids, probe)
    z = biased(bias, context)[list(ids)]
    for p in set(probe.wanted):
        assert len({z[slot] for slot, other in enumerate(probe.wanted) if other == p}) == 1


def test_logits_below_zero_can_be_had_where_all_other_ids_are_banned():
    probe = BY_NAME["repetition_negative"]
    ids = likeliest(2)
    with OracleServer() as server, JsonClient(server.url) as client:
        bias = force(VllmRoute(client, PROMPT), PROMPT, ids, probe)
    z = biased(bias)[list(ids)]
    assert (z < -20).all()
    np.testing.assert_allclose(np.exp(oracle.log_softmax(z)), probe.wanted, rtol=1e-4)


def test_logits_that_differ_from_reading_to_reading_are_good_enough_until_they_differ_too_much():
    probe = BY_NAME["top_k"]
    ids = likeliest(4)
    with OracleServer(noise=0.005) as server, JsonClient(server.url) as client:
        bias = force(VllmRoute(client, PROMPT), PROMPT, ids, probe)
    np.testing.assert_allclose(np.exp(oracle.log_softmax(biased(bias)[list(ids)])), probe.wanted, rtol=0.05)
    with OracleServer(noise=0.2) as server, JsonClient(server.url) as client:
        route = VllmRoute(client, PROMPT)
        with pytest.raises(NotForcedError, match="after 10 corrections its log-probabilities are still"):
            force(route, PROMPT, ids, probe)


def test_ties_that_do_not_stay_are_not_passed_off_as_such():
    probe = BY_NAME["top_p_boundary"]
    with OracleServer(noise=1e-4) as server, JsonClient(server.url) as client:
        route = VllmRoute(client, PROMPT)
        with pytest.raises(NotForcedError, match="equal to the bit"):
            force(route, PROMPT, likeliest(4), probe)


def test_ids_that_no_bias_lifts_over_the_rest_are_found_out():
    with OracleServer(rules=["raw"]) as server, JsonClient(server.url) as client:
        route = VllmRoute(client, PROMPT)
        with pytest.raises(NotForcedError, match="biases of up to 70 do not lift its ids over all others"):
            force(route, PROMPT, likeliest(4), BY_NAME["top_k"])


def test_ids_whose_logits_are_too_far_apart_for_any_bias_are_found_out():
    class Far:
        """Two ids 80 nats apart, which biases of at most 100 over the rest cannot bring together below zero."""

        def read(self, prompt, params):
            bias = params["logit_bias"]
            return {3: bias[3] + 80.0, 5: bias[5]}

    probe = replace(BY_NAME["repetition_negative"], wanted=(0.5, 0.5))
    with pytest.raises(NotForcedError, match="too far apart"):
        force(Far(), PROMPT, (3, 5), probe)


def test_lifted_ids_are_compared_without_the_rest():
    ids = likeliest(6)
    with OracleServer() as server, JsonClient(server.url) as client:
        seen = lifted(VllmRoute(client, PROMPT), PROMPT, dict.fromkeys(ids, 70.0))
    raw = logits(PROMPT)
    for one in ids:
        assert seen[one] - seen[ids[0]] == pytest.approx(float(raw[one] - raw[ids[0]]), abs=1e-4)
