"""The instructions of matrix products: the best there are, or what KEEPMASK_CPU names."""

import pytest

from keepmask.compiled.processor import VARIABLE, available, instructions
from keepmask.errors import ConfigError


def test_the_best_comes_first_and_plain_is_everywhere(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    order = ("tiles", "avx512_bf16", "plain")
    assert [name for name in order if name in available()] == list(available())
    assert available()[-1] == "plain"
    assert instructions() == available()[0]


@pytest.mark.parametrize("name", available())
def test_what_the_processor_has_can_be_named(monkeypatch, name):
    monkeypatch.setenv(VARIABLE, name)
    assert instructions() == name


def test_what_it_lacks_is_refused_by_name(monkeypatch):
    monkeypatch.setattr("keepmask.compiled.processor.available", lambda: ("plain",))
    monkeypatch.setenv(VARIABLE, "avx512_bf16")
    with pytest.raises(
        ConfigError, match="KEEPMASK_CPU=avx512_bf16: this processor has no such instructions; it has plain"
    ):
        instructions()


def test_what_nothing_is_called_is_refused(monkeypatch):
    monkeypatch.setenv(VARIABLE, "sse")
    with pytest.raises(ConfigError, match="must be one of tiles, avx512_bf16, plain"):
        instructions()
