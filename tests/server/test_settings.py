"""`ServerConfig`."""

from __future__ import annotations

from typing import Any

import pytest

from keepmask.errors import ConfigError
from keepmask.server.settings import ServerConfig


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"hots": "x"}, "hots: unknown server option; known are"),
        ({"port": 65536}, "port=65536: should be less than or equal to 65535. Port to listen on"),
        ({"port": "80"}, "port='80': should be a valid integer"),
        ({"mask_format": "xml"}, "mask_format='xml'"),
        ({"max_waiting": -1}, "max_waiting=-1"),
        ({"request_timeout_s": 0.0}, "request_timeout_s=0.0"),
        ({"request_timeout_s": float("inf")}, "request_timeout_s=inf"),
        ({"enable_weight_updates": True}, "give --api-key"),
        ({"weights_dir": "/w"}, "belongs to enable_weight_updates=True"),
        ({"await_weights": True}, "belongs to enable_weight_updates=True"),
        ({"api_keys": ("",)}, "api_keys: each must be printable ASCII without spaces"),
        ({"api_keys": ("a b",)}, "api_keys: each must be printable ASCII without spaces"),
        ({"api_keys": ("k\n",)}, "api_keys: each must be printable ASCII without spaces"),
        ({"api_keys": ("é",)}, "api_keys: each must be printable ASCII without spaces"),
    ],
)
def test_refusals_name_field_rule_and_remedy(fields: dict[str, Any], says: str):
    with pytest.raises(ConfigError) as raised:
        ServerConfig(**fields)
    assert says in str(raised.value)


def test_config_is_frozen_and_documented():
    config = ServerConfig()
    with pytest.raises(ValueError, match="frozen"):
        config.port = 1  # type: ignore[misc]
    assert all(field.description for field in ServerConfig.model_fields.values())
