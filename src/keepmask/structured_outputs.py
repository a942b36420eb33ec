"""`StructuredOutputsParams`: what form a completion's text must have, with vLLM's names."""

from __future__ import annotations

import json as json_text
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from keepmask.errors import RequestError

__all__ = ["StructuredOutputsParams"]

KINDS = ("json", "regex", "choice", "grammar", "json_object")

_TEXT, _FLAG = (str, type(None)), (bool, type(None))
_TYPES: dict[str, tuple[type, ...]] = {
    "json": (str, dict, type(None)),
    "regex": _TEXT,
    "choice": (list, tuple, type(None)),
    "grammar": _TEXT,
    "json_object": _FLAG,
    "disable_any_whitespace": _FLAG,
}
_TYPE_NAMES = {
    _TEXT: "a string",
    _FLAG: "true or false",
    (str, dict, type(None)): "a string or an object",
    (list, tuple, type(None)): "a list of strings",
}

MAX_CHARACTERS = 65_536
MAX_CHOICES = 4096
MAX_DEPTH = 32

SCHEMA_KEYWORDS = frozenset(
    (
        "$defs",
        "$id",
        "$ref",
        "$schema",
        "additionalProperties",
        "anyOf",
        "const",
        "default",
        "definitions",
        "description",
        "enum",
        "examples",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "format",
        "items",
        "maxItems",
        "maxLength",
        "maximum",
        "minItems",
        "minLength",
        "minimum",
        "pattern",
        "prefixItems",
        "properties",
        "required",
        "title",
        "type",
    )
)
"""What of JSON Schema is followed, or says nothing of the text. Others would be passed over, so they are refused."""

_ANNOTATIONS = {"$defs", "$id", "$schema", "default", "definitions", "description", "examples", "title"}
_BESIDE = {
    "$ref": _ANNOTATIONS | {"$ref"},
    "anyOf": _ANNOTATIONS | {"anyOf"},
    "const": _ANNOTATIONS | {"const", "type"},
    "enum": _ANNOTATIONS | {"enum", "type"},
}
"""What may stand beside a keyword that says it all."""
_OF_STRINGS = (("pattern",), ("format",), ("minLength", "maxLength"))

FORMATS = frozenset(("duration", "ipv6", "json-pointer", "uri", "uuid"))
"""Formats whose every text the grammar knows; of the others it knows the shape, which lets through a 31st of April."""


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """One of json, regex, choice, grammar and json_object: tokens that leave it are banned at every position.

    Raises RequestError naming the field, the rule and the remedy.
    """

    json: str | dict[str, Any] | None = None
    """A JSON schema, as text or as an object. Objects hold the properties it names and no others."""
    regex: str | None = None
    """The whole text matches it."""
    choice: list[str] | None = None
    """The text is one of these."""
    grammar: str | None = None
    """The rules of a grammar in GBNF; the text follows its rule `root`."""
    json_object: bool | None = None
    """The text is any JSON value."""
    disable_any_whitespace: bool = False
    """With json: a single space after separators, instead of any white space."""

    def __post_init__(self) -> None:
        for name, types in _TYPES.items():
            if not isinstance(value := getattr(self, name), types):
                raise _refusal(f"{name}={str(value)[:60]!r}: must be {_TYPE_NAMES[types]}")
        if self.choice is not None and not all(isinstance(text, str) and text for text in self.choice):
            raise _refusal("choice: must hold strings of one character or more")
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            came = f"{' and '.join(given)} are given" if given else "none is given"
            raise _refusal(f"exactly one of {', '.join(KINDS)} must be given; {came}")
        if self.json is not None:
            _check_schema(self.schema_text)
        if self.choice is not None and not 0 < len(self.choice) <= MAX_CHOICES:
            raise _refusal(f"choice: {len(self.choice)} choices; must be 1 to {MAX_CHOICES}")
        size = sum(map(len, self.choice)) if self.choice is not None else len(self.regex or self.grammar or "")
        if size > MAX_CHARACTERS:
            raise _refusal(f"{given[0]}: {size} characters; must be at most {MAX_CHARACTERS}")

    @classmethod
    def of(cls, value: Any) -> StructuredOutputsParams:
        """From what a request holds."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, dict):
            raise _refusal(f"must be an object with one of {', '.join(KINDS)}, not {type(value).__name__}")
        known = {field.name for field in fields(cls)}
        # What other engines take at values that ask for nothing.
        neutral = {
            "disable_additional_properties": (False, True),
            "whitespace_pattern": (None,),
            "structural_tag": (None,),
        }
        for name, item in value.items():
            if name not in known and item not in neutral.get(name, ()):
                raise _refusal(f"{name}={item!r}: is not supported; known are {', '.join(sorted(known))}")
        return cls(**{name: item for name, item in value.items() if name in known})

    def as_dict(self) -> dict[str, Any]:
        """The fields that were given, for JSON."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}

    @property
    def schema_text(self) -> str:
        """The JSON schema as text."""
        return self.json if isinstance(self.json, str) else json_text.dumps(self.json)

    @property
    def grammar_schema(self) -> str:
        """The schema as its grammar is made from: lengths of strings as patterns, which keep control characters out."""
        schema = json_text.loads(self.schema_text)
        for keywords in _schemas(schema, 0):
            if not keywords.keys().isdisjoint(_OF_STRINGS[2]):
                least, most = keywords.pop("minLength", 0), keywords.pop("maxLength", "")
                keywords["pattern"] = f"^[^\\x00-\\x1f]{{{least},{most}}}$"
                keywords.setdefault("type", "string")
        return json_text.dumps(schema)


def _check_schema(text: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise _refusal(f"json: a schema of {len(text)} characters; must be at most {MAX_CHARACTERS}")
    try:
        schema = json_text.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refusal(f"json: is no JSON: {error}") from None
    if not isinstance(schema, dict):
        raise _refusal(f"json: a schema must be an object, not {type(schema).__name__}")
    for keywords in _schemas(schema, 0):
        _check_keywords(keywords)


def _check_keywords(keywords: dict[str, Any]) -> None:
    """Refuse what one schema says that a grammar would pass over."""
    if unknown := sorted(keywords.keys() - SCHEMA_KEYWORDS):
        remedy = "use anyOf" if unknown[0] == "oneOf" else "leave it out, or check the text afterwards"
        raise _refusal(f"json: the schema's {unknown[0]!r} cannot be enforced; {remedy}")
    if (form := keywords.get("format")) is not None and form not in FORMATS:
        raise _refusal(
            f"json: format {form!r} cannot be enforced; known are {', '.join(sorted(FORMATS))}; use a pattern"
        )
    for whole in ("$ref", "anyOf", "const", "enum"):
        if whole in keywords and (others := sorted(keywords.keys() - _BESIDE[whole])):
            raise _refusal(f"json: {others[0]!r} beside {whole!r} cannot be enforced; put it into one of them")
    if len(strings := [name for name in _OF_STRINGS if not keywords.keys().isdisjoint(name)]) > 1:
        raise _refusal(f"json: {strings[0][0]!r} beside {strings[1][0]!r} cannot be enforced; use a pattern alone")


def _schemas(schema: Any, depth: int) -> Iterator[dict[str, Any]]:
    """A schema and all schemas in it."""
    if depth > MAX_DEPTH:
        raise _refusal(f"json: schemas are nested more than {MAX_DEPTH} deep")
    if not isinstance(schema, dict):
        return
    yield schema
    for name, value in schema.items():
        if name in ("properties", "$defs", "definitions") and isinstance(value, dict):
            inner = list(value.values())
        elif name in ("anyOf", "prefixItems") and isinstance(value, list):
            inner = value
        else:
            inner = [value] if name in ("items", "additionalProperties") else []
        for part in inner:
            yield from _schemas(part, depth + 1)


def _refusal(problem: str) -> RequestError:
    return RequestError(f"structured_outputs: {problem}", param="structured_outputs")
