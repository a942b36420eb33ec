"""The README's Python runs and gives what it says."""

import re
from pathlib import Path

import pytest

from keepmask.bench import readme_tables

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.e2e
def test_the_python_gives_a_ratio_of_one(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    exec(compile(code, str(README), "exec"), {})
    ratio = float(re.search(r"tensor\((.*?)[,)]", capsys.readouterr().out.splitlines()[-1])[1])
    assert ratio == pytest.approx(1, abs=1e-4)


def test_files_and_folders_it_names_exist():
    text = README.read_text("utf-8")
    for link in re.findall(r"\]\(([\w./-]+)\)", text):
        assert (README.parent / link).exists(), link
    for script in re.findall(r"scripts/\w+", text):
        assert (README.parent / script).exists(), script


def test_its_tables_are_those_of_the_measured_rows():
    text = README.read_text("utf-8")
    assert readme_tables.written(text) == text
    assert text.count("| ") > 100
