import re

import pytest

from keepmask.report.number_tables import number, numbers_table, plural, ratio_table, share


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (0.93124, "4", "0.9312"),
        (1.0, "4", "1.0000"),
        (-0.0712, "4", "\N{MINUS SIGN}0.0712"),
        (-1.7e-8, "4", "\N{MINUS SIGN}1.7e\N{MINUS SIGN}08"),
        (0.0, "4", "0.0000"),
        (0.0, "e", "0"),
        (3.21e-6, "e", "3.2e\N{MINUS SIGN}06"),
        (1234567, "n", "1,234,567"),
        (404.7, "g", "404.7"),
        (0.342, "%", "34.2 %"),
    ],
)
def test_numbers_are_written_so_that_none_rounds_to_nothing(value, form, text):
    assert number(value, form) == text


@pytest.mark.parametrize(("value", "text"), [(0, "0 %"), (0.0012, "0.12 %"), (0.5, "50.0 %"), (1, "100 %")])
def test_shares_are_percentages(value, text):
    assert share(value) == text


def test_ratios_stand_beside_each_other():
    html = ratio_table({"ratio_full_mean": 0.9, "ratio_replayed_mean": 1.0, "ratio_replayed_outside_0.1": 0.25})
    rows = re.findall(r"<tr>.*?</tr>", html)[1:]
    assert [re.findall(r"<td>(.*?)</td>", row) for row in rows] == [["0.9000", "1.0000"], ["", "25.0 %"]]


def test_other_numbers_are_in_words_and_unknown_ones_as_they_are():
    html = numbers_table({"my <metric>": 3.5, "num_tokens": 6112, "ratio_full_mean": 0.9})
    assert "tokens</th><td>6,112" in html
    assert "my &lt;metric&gt;</th><td>3.5" in html
    assert "0.9" not in html


def test_whole_vocabulary_rows_are_mentioned_only_where_there_are_any():
    assert "vocabulary" not in numbers_table({"num_rows_of_unknown_width": 0, "num_tokens": 1})
    assert "vocabulary</th><td>3" in numbers_table({"num_rows_of_unknown_width": 3})


def test_empty_tables_are_left_out():
    assert ratio_table({"num_tokens": 3}) == ""
    assert numbers_table({}) == ""


def test_nouns_agree_with_their_numbers():
    assert [plural(value) for value in (0, 1, 2)] == ["s", "", "s"]
