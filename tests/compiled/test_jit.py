"""Compiled kernels come from numba's cache unless the source of any of them has changed."""

from keepmask.compiled.jit import SOURCES, jit


def test_cached_machine_code_depends_on_the_sources_of_all_kernels():
    # numba makes what a function closes over a part of the key of its cached code.
    offset = 3

    def plus(x):
        return x + offset

    compiled = jit(plus)
    assert compiled(4) == 7
    assert [cell.cell_contents for cell in compiled.py_func.__closure__] == [3, SOURCES]
