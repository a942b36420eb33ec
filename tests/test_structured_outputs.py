"""What is asked of a text's form, and what is refused before anything is compiled."""

import pytest

from keepmask.errors import RequestError
from keepmask.structured_outputs import StructuredOutputsParams


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object must be given; none is given"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice are given"),
        ({"json_object": False}, "none is given"),
        ({"json": "{"}, "json: is no JSON"),
        ({"json": "[1]"}, "a schema must be an object, not list"),
        ({"json": {"type": "integer", "multipleOf": 3}}, "'multipleOf' cannot be enforced"),
        ({"json": {"items": {"uniqueItems": True}}}, "'uniqueItems' cannot be enforced"),
        ({"json": {"properties": {"a": {"anyOf": [{"not": {}}]}}}}, "'not' cannot be enforced"),
        ({"json": {"$defs": {"a": {"patternProperties": {}}}}}, "'patternProperties' cannot be enforced"),
        ({"json": {"format": "date"}}, "format 'date' cannot be enforced"),
        ({"json": {"oneOf": [{"enum": [1]}]}}, "'oneOf' cannot be enforced; use anyOf"),
        ({"json": {"anyOf": [{"enum": [1]}], "type": "integer"}}, "'type' beside 'anyOf' cannot be enforced"),
        ({"json": {"items": {"$ref": "#/$defs/a", "minItems": 1}}}, "'minItems' beside '\\$ref' cannot be enforced"),
        (
            {"json": {"type": "string", "maxLength": 3, "pattern": "a"}},
            "'pattern' beside 'minLength' cannot be enforced",
        ),
        ({"choice": []}, "0 choices"),
        ({"choice": ["a"] * 5000}, "5000 choices"),
        ({"regex": "a" * 100_000}, "100000 characters"),
        ({"regex": 5}, "regex='5': must be a string"),
        ({"regexp": "a"}, "regexp='a': is not supported"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern=' ': is not supported"),
        ({"json": {"title": "multipleOf"} | {"enum": [{"not": 1}]}, "regex": None, "choice": "ab"}, "choice"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(fields, message):
    with pytest.raises(RequestError, match=message) as refused:
        StructuredOutputsParams.of(fields)
    assert refused.value.param == "structured_outputs"


def test_a_schema_nested_too_deep_is_refused():
    schema = {"type": "null"}
    for _ in range(40):
        schema = {"items": schema}
    with pytest.raises(RequestError, match="nested more than 32 deep"):
        StructuredOutputsParams(json=schema)


def test_fields_of_other_engines_that_ask_for_nothing_are_taken():
    wanted = StructuredOutputsParams.of(
        {
            "regex": "a",
            "json": None,
            "whitespace_pattern": None,
            "structural_tag": None,
            "disable_additional_properties": False,
        }
    )
    assert wanted == StructuredOutputsParams(regex="a")
    assert wanted.as_dict() == {"regex": "a"}


def test_values_are_not_taken_for_keywords():
    StructuredOutputsParams(json={"enum": [{"not": 1}], "default": {"multipleOf": 2}, "title": "not"})
