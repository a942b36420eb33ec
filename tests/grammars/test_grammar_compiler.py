"""Structured outputs with a real tokenizer: whatever is drawn has the form, by an independent validator."""

from __future__ import annotations

import json
import re
import time

import jsonschema_rs
import numpy as np
import pytest
from transformers import AutoTokenizer

from keepmask.errors import RequestError
from keepmask.grammars.grammar_compiler import GrammarCompiler
from keepmask.models import bundled
from keepmask.structured_outputs import StructuredOutputsParams

V = 49_152
MOST = 200


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(bundled.path("smollm2-135m"))


@pytest.fixture(scope="module")
def whole(tokenizer):
    """Ids that are whole characters: bytes of parts of them may come in any order."""
    return np.array(["\ufffd" not in tokenizer.decode([token_id]) for token_id in range(V)])


@pytest.fixture(scope="module")
def compiler(tokenizer):
    compiler = GrammarCompiler(tokenizer, vocab_size=V, stop_token_ids=[tokenizer.eos_token_id], timeout_s=20)
    yield compiler
    compiler.close()


def walk(compiler, tokenizer, wanted, rng, whole=True):
    """The text of random allowed tokens up to the end, or None where `MOST` tokens did not get there."""
    state = compiler.open(wanted)
    token_ids = []
    for _ in range(MOST):
        allowed = np.flatnonzero(state.allowed() & whole)
        assert allowed.size
        ends = tokenizer.eos_token_id in allowed
        # Short ids are single characters: a walk over them reaches every corner of a small grammar.
        choice = tokenizer.eos_token_id if ends and rng.random() < 0.3 else int(rng.choice(allowed[:200]))
        state.append(choice)
        if state.ended:
            assert not state.allowed().any()
            return tokenizer.decode(token_ids)
        token_ids.append(choice)
    return None


SCHEMAS = {
    "type": {"type": "integer"},
    "several types": {"type": ["boolean", "null"]},
    "enum": {"enum": ["a", 1, None, {"b": [1.5]}]},
    "const": {"const": 'x"y'},
    "object": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}},
        "required": ["a"],
    },
    "additionalProperties": {
        "type": "object",
        "properties": {"a": {"enum": [1]}},
        "required": ["a"],
        "additionalProperties": {"type": "boolean"},
    },
    "items": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 3},
    "prefixItems": {"type": "array", "prefixItems": [{"enum": [1]}, {"enum": ["b"]}], "items": False, "minItems": 2},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 4},
    "pattern": {"type": "string", "pattern": "^[a-c]{2}[0-9]$"},
    "range": {"type": "integer", "minimum": -3, "maximum": 12},
    "exclusive": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 4},
    "number range": {"type": "number", "minimum": 0, "maximum": 1},
    "anyOf": {"anyOf": [{"enum": [1]}, {"type": "boolean"}]},
    "$ref": {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/b"}, "maxItems": 2}, "b": {"enum": [7]}},
    },
    "at least": {"type": "string", "minLength": 3},
    "at most": {"type": "array", "items": {"type": "string", "maxLength": 2}, "maxItems": 2},
    "any pattern": {"type": "string", "pattern": "^.{2,5}$"},
    "not": {"type": "string", "pattern": "^[^a]{2,3}$"},
    "inner pattern": {"type": "string", "pattern": 'b[x"\\\\]'},
    "duration": {"type": "string", "format": "duration"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv6": {"type": "string", "format": "ipv6"},
    "json-pointer": {"type": "string", "format": "json-pointer"},
    "uri": {"type": "string", "format": "uri"},
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_all_text_that_can_be_drawn_is_valid_under_the_schema(name, compiler, tokenizer, whole):
    schema = SCHEMAS[name]
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    rng = np.random.default_rng(0)
    wanted = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    walks = [walk(compiler, tokenizer, wanted, rng, whole) for _ in range(12)]
    texts = [text for text in walks if text is not None]
    assert texts
    for text in texts:
        assert validator.is_valid(json.loads(text)), text


def test_choices_are_drawn_whole_and_each_can_be(compiler, tokenizer):
    choices = ["yes", "no", 'say "no"\\', "ja\nnein", "😀"]
    wanted = StructuredOutputsParams(choice=choices)
    rng = np.random.default_rng(0)
    texts = {walk(compiler, tokenizer, wanted, rng) for _ in range(60)}
    assert texts == set(choices)


def test_a_regex_is_matched_by_the_whole_text(compiler, tokenizer):
    wanted, rng = StructuredOutputsParams(regex=r"[a-f]{2,3}-(0|[1-9]\d*)"), np.random.default_rng(0)
    texts = [text for _ in range(20) if (text := walk(compiler, tokenizer, wanted, rng)) is not None]
    assert texts
    assert all(re.fullmatch(r"[a-f]{2,3}-(0|[1-9]\d*)", text) for text in texts)


def test_a_grammar_and_any_json(compiler, tokenizer):
    rng = np.random.default_rng(0)
    grammar = StructuredOutputsParams(grammar='root ::= "(" inner ")"\ninner ::= "x" | root')
    texts = [text for _ in range(20) if (text := walk(compiler, tokenizer, grammar, rng)) is not None]
    assert all(re.fullmatch(r"\(+x\)+", text) and text.count("(") == text.count(")") for text in texts)
    texts = [walk(compiler, tokenizer, StructuredOutputsParams(json_object=True), rng) for _ in range(20)]
    assert any(texts)
    for text in texts:
        if text is not None:
            json.loads(text)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"regex": "(a"}, "structured_outputs:"),
        ({"grammar": "root := 1"}, "structured_outputs:"),
        ({"grammar": 'other ::= "a"'}, "structured_outputs:"),
        ({"json": {"$ref": "#/nowhere"}}, "structured_outputs:"),
        ({"json": {"type": "integer", "minimum": 3, "maximum": 2}}, "structured_outputs:"),
    ],
)
def test_what_has_no_meaning_is_refused_in_words(wanted, message, compiler):
    with pytest.raises(RequestError, match=message):
        compiler.open(StructuredOutputsParams(**wanted))


def test_what_takes_too_long_or_too_much_is_given_up_and_the_next_is_served(tokenizer):
    hungry = {"regex": "(" + "|".join(f"(a{{1,{n}}}b{{1,{n}}}){{1,400}}" for n in range(300, 420)) + ")"}
    compiler = GrammarCompiler(tokenizer, vocab_size=V, timeout_s=1.0, max_bytes=2**20)
    try:
        compiler.open(StructuredOutputsParams(choice=["a"]))
        start = time.monotonic()
        with pytest.raises(RequestError, match=r"takes"):
            compiler.open(StructuredOutputsParams(**hungry))
        assert time.monotonic() - start < 10
        assert compiler.open(StructuredOutputsParams(choice=["b"])).allowed().any()
    finally:
        compiler.close()
