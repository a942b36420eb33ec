import json

import pytest

from keepmask.bench.timing import in_turn, quantiles, report


def test_runs_take_turns_and_fast_ones_are_called_more_often():
    called = []
    times = in_turn({"a": lambda: called.append("a"), "b": lambda: called.append("b")}, seconds=1, rounds=3, most=2)
    assert called == ["a", "b", *["a", "a", "b", "b"] * 3]
    assert {name: len(values) for name, values in times.items()} == {"a": 6, "b": 6}
    once = in_turn({"a": lambda: None}, seconds=0, rounds=5)
    assert len(once["a"]) == 5
    assert min(once["a"]) >= 0


def test_quantiles_are_of_the_values():
    assert quantiles([0.0, 10.0]) == pytest.approx({"p20": 2.0, "p50": 5.0, "p80": 8.0})


def test_rows_are_lines_or_json_with_the_facts(capsys):
    rows = [{"op": "x", "p50": 1.23456789}]
    report(rows, {"device": "d"}, None)
    report(rows, {"device": "d"}, "{op} {p50:.1f}".format_map)
    first, second = capsys.readouterr().out.splitlines()
    assert json.loads(first) == {"op": "x", "p50": 1.2346, "device": "d"}
    assert second == "x 1.2"
