"""What no file of the package may do, whatever it is for."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "keepmask"
FILES = sorted(SOURCE.rglob("*.py"))
RUNS_DATA = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "yaml"}
"""Modules that may run what they read."""
RUNS = {"eval", "exec", "__import__", "torch.load", "np.load", "numpy.load"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_nothing_read_is_ever_run(file):
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            assert RUNS_DATA.isdisjoint(alias.name.partition(".")[0] for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert (node.module or "").partition(".")[0] not in RUNS_DATA
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in RUNS


def test_there_are_files_to_look_at():
    assert len(FILES) > 100
