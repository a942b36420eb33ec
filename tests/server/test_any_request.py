"""Requests made from the server's own OpenAPI document, right and wrong ones: none brings an answer of 5xx."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from serving import Serving

KEY = "key"
EXAMPLES = 15


@pytest.fixture(scope="module")
def open_house(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Everything enabled, and short answers."""
    options: dict[str, Any] = {"enable_weight_updates": True, "weights_dir": str(tmp_path_factory.mktemp("weights"))}
    engine = {"max_model_len": 32, "kv_cache_memory_bytes": 2**21}
    limits = {"max_completions_per_request": 8, "request_timeout_s": 0.5}
    with Serving(checkpoint, engine=engine, api_keys=(KEY,), **limits, **options) as serving:
        yield serving


def ask_many(serving: Serving, operation: Any, mode: GenerationMode) -> Counter[int]:
    """Statuses of the answers to made-up requests."""
    statuses: Counter[int] = Counter()

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=EXAMPLES,
        phases=(Phase.generate,),
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    def ask(case: Any) -> None:
        response = case.call(base_url=serving.url, headers={"authorization": f"Bearer {KEY}"}, timeout=30)
        case.validate_response(response, checks=[not_a_server_error])
        statuses[response.status_code] += 1
        serving.client.post("/resume").raise_for_status()

    with contextlib.suppress(Unsatisfiable):  # routes that take nothing cannot be asked wrongly
        ask()
    return statuses


@pytest.mark.parametrize("mode", GenerationMode)
def test_no_request_the_document_can_describe_is_answered_5xx(open_house: Serving, mode: GenerationMode):
    schema = schemathesis.openapi.from_dict(open_house.client.get("/openapi.json").json())
    found = {
        operation.label: ask_many(open_house, operation, mode)
        for operation in (result.ok() for result in schema.get_all_operations())
    }
    assert len(found) > 20
    open_house.settle()
    assert open_house.client.get("/health").status_code == 200
    everything = sum(found.values(), Counter())
    assert everything[400] > 0
    assert all(status < 500 for status in everything)
    if mode is GenerationMode.POSITIVE:
        for name in ("POST /inference/v1/generate", "POST /v1/completions", "POST /tokenize"):
            assert found[name][200] > 0, found[name]
