import subprocess
import sys

import pytest

import keepmask


def run(code):
    """Run code in a fresh interpreter; whatever it prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_keepmask_loads_no_heavy_library():
    heavy = ["torch", "transformers", "pydantic", "pyarrow", "numpy", "numba", "matplotlib", "fastapi"]
    assert run(f"import sys, keepmask; print([name for name in {heavy} if name in sys.modules])").strip() == "[]"


def test_masks_and_outputs_need_numpy_alone():
    assert run("""
import sys
for name in ("torch", "transformers", "pydantic", "pyarrow", "numba"):
    sys.modules[name] = None  # importing it now fails
import keepmask
from keepmask.outputs import Rollout
mask = keepmask.SamplingMask.from_lists([[3, 1], []])
print(mask.token_ids, Rollout(prompt_token_ids=[1], token_ids=[3, 2], sampling_mask=mask).text)
""").split() == ["[[1,", "3],", "[]]"]


def test_replay_needs_torch_and_numpy_alone():
    run("""
import sys
for name in ("transformers", "pydantic", "pyarrow", "numba", "tokenizers", "safetensors", "matplotlib", "rich"):
    sys.modules[name] = None
import keepmask
assert "torch" not in sys.modules
for name in keepmask.replay.__all__:
    getattr(keepmask.replay, name)
""")


@pytest.mark.parametrize("name", keepmask.__all__)
def test_every_public_name_resolves(name):
    assert getattr(keepmask, name).__name__.split(".")[-1] == name
    assert name in dir(keepmask)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'keepmask' has no attribute 'LLm'"):
        keepmask.LLm  # noqa: B018


def test_the_package_says_that_it_is_typed():
    from importlib.resources import files

    assert files("keepmask").joinpath("py.typed").is_file()
