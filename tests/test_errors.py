import copy
import pickle
import re

import pytest

from keepmask import errors


def drawn_tree():
    """(parent, child) pairs of the tree in the module's docstring."""
    pairs, above = [], {}
    for line in errors.__doc__.splitlines():
        if match := re.match(r"^    ((?:[│ ]   )*(?:[├└]── )?)(\w+Error)\b", line):
            depth = len(match[1]) // 4
            above[depth] = match[2]
            if depth:
                pairs.append((above[depth - 1], match[2]))
    return pairs


def test_the_drawn_tree_is_the_tree_of_the_classes():
    pairs = drawn_tree()
    assert {child for _, child in pairs} | {"KeepmaskError"} == set(errors.__all__)
    for parent, child in pairs:
        assert getattr(errors, parent) in getattr(errors, child).__bases__, child


def test_every_class_of_the_module_is_public_and_documented():
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert classes == set(errors.__all__)
    for name in classes:
        assert getattr(errors, name).__doc__


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("ConfigError", ValueError),
        ("RequestError", ValueError),
        ("MaskError", ValueError),
        ("EngineError", RuntimeError),
        ("BackendError", RuntimeError),
    ],
)
def test_errors_are_caught_as_their_builtin_kind_too(name, builtin):
    with pytest.raises(builtin, match="why"):
        raise getattr(errors, name)("why")


def test_a_request_error_names_its_field():
    error = errors.RequestError("top_p=2: must be in (0, 1]", param="top_p")
    assert (str(error), error.param) == ("top_p=2: must be in (0, 1]", "top_p")
    assert errors.RequestError("no field at fault").param is None
    with pytest.raises(TypeError):
        errors.RequestError("why", "top_p")


def test_a_refusal_can_be_told_in_the_clients_own_words():
    error = errors.RequestError("max_tokens=9: max_tokens is too much", param="max_tokens", code="c")
    other = error.renamed("max_new_tokens")
    assert str(other) == "max_new_tokens=9: max_tokens is too much"
    assert (other.param, other.code) == ("max_new_tokens", "c")
    assert str(errors.RequestError(": why").renamed("n")) == "n: why"


def test_a_request_error_crosses_process_borders_whole():
    error = errors.RequestError("why", param="n", code="c")
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(other), str(other), other.param, other.code) == (errors.RequestError, "why", "n", "c")
