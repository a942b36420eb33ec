"""The rules of the architecture that no linter knows: names, circles, sizes."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "keepmask"
TREES = {file: ast.parse(file.read_text("utf-8")) for file in sorted(SOURCE.rglob("*.py"))}
MODULES = {
    ".".join(file.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): file for file in TREES
}

MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 12
MAX_KERNEL_PARAMETERS = 10


def functions(file: Path) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, bool]]:
    """Every function of a file, and whether it is a method."""
    for node in ast.walk(TREES[file]):
        inside = node.body if isinstance(node, ast.ClassDef | ast.Module) else []
        for child in inside:
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield child, isinstance(node, ast.ClassDef)


def num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    named = function.args
    return len(named.posonlyargs) + len(named.args) + len(named.kwonlyargs)


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def imports(file: Path) -> set[str]:
    """The modules of the package that a file imports, wherever in the file it does."""
    found = set()
    for node in ast.walk(TREES[file]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found & MODULES.keys()


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one node (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph[node]:
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for node in graph:
        if node not in index:
            visit(node)
    return found


def test_no_file_name_stands_in_two_rooms():
    counts = Counter(file.name for file in TREES if file.name != "__init__.py")
    assert [name for name, count in counts.items() if count > 1] == []


def test_files_import_one_another_in_no_circle():
    packages = {name for name, file in MODULES.items() if file.name == "__init__.py"}
    graph = {name: imports(file) - packages for name, file in MODULES.items() if name not in packages}
    assert circles(graph) == []


def test_circles_are_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


@pytest.mark.parametrize("file", TREES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_functions_can_be_read_at_a_glance(file):
    long = {function.name: function.end_lineno - function.lineno + 1 for function, _ in functions(file)}
    assert {name: lines for name, lines in long.items() if lines > MAX_FUNCTION_LINES} == {}


@pytest.mark.parametrize("file", TREES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_signatures_are_short(file):
    for function, is_method in functions(file):
        if is_kernel(function):
            assert num_parameters(function) <= MAX_KERNEL_PARAMETERS, function.name
        elif not function.name.startswith("_") or function.name == "__init__":
            assert num_parameters(function) - is_method <= MAX_PARAMETERS, function.name
