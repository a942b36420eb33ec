"""The kernels compile for a CUDA device, without one at hand, and divide as IEEE 754 says."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

# Interpreted and compiled functions do not share a process.
SCRIPT = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource

from keepmask.forward import paged_attention_triton as paged
from keepmask.sampling.cuda.capture_triton import capture_rows
from keepmask.sampling.cuda.decide_triton import decide_rows
from keepmask.sampling.cuda.entries_triton import best_rows, ranks_in_tiles
from keepmask.sampling.cuda.select_triton import collect, scan

POINTERS = {
    "records_ptr": "*i64", "draws_ptr": "*i64", "tiles_ptr": "*i64", "offsets_ptr": "*i64", "token_ptr": "*i64",
    "logits_ptr": "*fp32", "z_ptr": "*fp32",
}
TUPLES = {
    ("collect", "source"): ("*fp32", "i32", "i32"),
    ("collect", "groups"): ("*i32", "i32", "*i32"),
    ("collect", "tiles"): ("*i64", "i32"),
    ("collect", "out"): ("*fp32", "*i32", "i32"),
    ("capture_rows", "out"): ("*i32", "*fp32"),
    ("best_rows", "out"): ("*i32", "*i32", "*fp32", "*fp32"),
}


def type_of(name):
    return POINTERS.get(name) or ("*i32" if name.endswith("_ptr") else "i32")


for kernel, constants, num_warps in (
    (scan, {"GROUP": 64, "TILE": 4096}, 8),
    (collect, {"TILES": 64, "GROUP": 64, "GROUPS": 4096, "TILE": 1024}, 8),
    (decide_rows, {"ALL": False, "TILE": 512}, 4),
    (decide_rows, {"ALL": True, "TILE": 4096}, 16),
    (capture_rows, {"ALL": False, "TILE": 512}, 4),
    (capture_rows, {"ALL": True, "TILE": 4096}, 8),
    (best_rows, {"ALL": False, "TILE": 512}, 4),
    (best_rows, {"ALL": True, "TILE": 4096}, 16),
    (ranks_in_tiles, {"TILE": 4096}, 8),
):
    assert len(kernel.arg_names) <= 10
    signature = {
        name: "constexpr" if name in constants else TUPLES.get((kernel.__name__, name)) or type_of(name)
        for name in kernel.arg_names
    }
    source = ASTSource(kernel, signature, constexprs=constants)
    options = {"num_warps": num_warps, "enable_fp_fusion": False}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    print(kernel.__name__, "div.rn.f32" in ptx, "div.full" in ptx or "div.approx" in ptx)

constants = {"SHAPE": paged._Shape(4, 16, 128, 16, 64), "CAPPED": True, "WIDENS": False}
heads = paged._Heads("*bf16", "i32", "i32")
signature = {
    "queries": heads,
    "cache": paged._Cache("*bf16", "*bf16", "i32"),
    "places": paged._Places("*i32", "i32", "*i32", "*i32"),
    "out": heads,
    "options": ("i32", "fp32", "fp32"),
} | dict.fromkeys(constants, "constexpr")
assert list(signature) == list(paged.attend.arg_names)
source = ASTSource(paged.attend, signature, constexprs=constants)
ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
print("attend", "mma" in ptx, "nothing else")
"""


def test_every_kernel_compiles_for_a_hopper_gpu(tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 10
    assert all(line[1:] == ["True", "False"] for line in lines[:-1]), lines
    assert lines[-1][:2] == ["attend", "True"]
