"""Cached machine code is used again as long as none of the sources it comes from has changed, and only then."""

import importlib.metadata
import os
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from keepmask.compiled.jit import jit, sources

VERIFIED = "<0.69,>=0.62"
"""The versions of numba whose internals (`numba.core.cgutils`, `numba.extending.intrinsic`, dispatchers' overloads and
the key of its cache) this package was tried with, first and last."""

FILES = {
    "__init__.py": "",
    "kernel.py": """
        from keepmask.compiled.jit import jit
        from .helper import plus

        @jit
        def run(x):
            return plus(x) + 1
        """,
    "helper.py": """
        from keepmask.compiled.jit import jit
        from cached_here.constant import OFFSET

        @jit
        def plus(x):
            return x + OFFSET
        """,
    "constant.py": "OFFSET = 10",
    "unrelated.py": "import cached_here.kernel",
}
RUN = """
from cached_here.kernel import run
value = run(1)
print(value, sum(run.stats.cache_hits.values()), sum(run.stats.cache_misses.values()))
"""


def test_machine_code_is_made_anew_when_a_source_of_it_changes_and_only_then(tmp_path):
    folder = tmp_path / "cached_here"
    folder.mkdir()

    def write(name, text):
        (folder / name).write_text(textwrap.dedent(text))

    def run():
        """Value, cache hits, cache misses."""
        paths = os.pathsep.join([str(tmp_path), *(path for path in sys.path if path)])
        environment = os.environ | {"PYTHONPATH": paths, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
        answer = subprocess.run(
            [sys.executable, "-c", RUN], env=environment, capture_output=True, text=True, check=True
        )
        return tuple(map(int, answer.stdout.split()))

    for name, text in FILES.items():
        write(name, text)
    assert run() == (12, 0, 1)
    write("unrelated.py", "x = 1")
    write("new.py", "x = 1")
    assert run() == (12, 1, 0)
    write("constant.py", "OFFSET = 20")
    assert run() == (22, 0, 1)
    write("helper.py", FILES["helper.py"].replace("x + OFFSET", "x + 2 * OFFSET").replace("constant", "renamed"))
    (folder / "constant.py").rename(folder / "renamed.py")
    assert run() == (42, 0, 1)


def test_sources_are_those_of_all_imports():
    assert list(sources("keepmask.compiled.team_rows")) == [
        "keepmask.compiled",
        "keepmask.compiled.team",
        "keepmask.compiled.team_rows",
    ]
    assert sources("no_such_module") == {}


def test_closures_keep_what_they_close_over():
    offset = 3

    def plus(x):
        return x + offset

    assert jit(plus)(4) == 7


def test_numba_is_of_a_version_whose_internals_were_tried():
    project = Path(__file__).parents[2] / "pyproject.toml"
    extras = tomllib.loads(project.read_text())["project"]["optional-dependencies"]
    (asked,) = (each for text in extras["engine"] if (each := Requirement(text)).name == "numba")
    assert str(asked.specifier) == VERIFIED
    installed = importlib.metadata.version("numba")
    assert asked.specifier.contains(installed), (
        f"numba {installed}: the compiled kernels use its internals, which were tried with {VERIFIED}; "
        "run tests/compiled, tests/forward and tests/sampling with it, then move the bound here and in pyproject.toml"
    )
