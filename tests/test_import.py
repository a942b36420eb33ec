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
    heavy = ["torch", "transformers", "pydantic", "pyarrow", "numpy", "numba", "matplotlib", "starlette"]
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


ONLY_TORCH_AND_NUMPY = """
import re, sys
from importlib import metadata

allowed, found = ["keepmask", "numpy", "torch"], set()
while allowed:
    name = allowed.pop().lower().replace("-", "_")
    if name not in found:
        found.add(name)
        try:
            needs = metadata.requires(name) or [] if name != "keepmask" else []
        except metadata.PackageNotFoundError:  # of another platform
            continue
        allowed += [re.match("[A-Za-z0-9_.-]+", need)[0] for need in needs if "extra ==" not in need]
for module, packages in metadata.packages_distributions().items():
    if not found & {package.lower().replace("-", "_") for package in packages}:
        sys.modules[module] = None  # importing it now fails
assert {"numba", "transformers", "pydantic", "pyarrow", "scipy"} <= {n for n, m in sys.modules.items() if m is None}
sys.modules["triton"] = None
"""


def test_replay_needs_torch_and_numpy_alone():
    run(
        ONLY_TORCH_AND_NUMPY
        + """
import keepmask
assert "torch" not in sys.modules
for name in set(keepmask.replay.__all__) - {"add_lm_head"}:  # which takes a model of transformers
    getattr(keepmask.replay, name)
"""
    )


def test_replay_works_with_torch_and_numpy_alone():
    run(
        ONLY_TORCH_AND_NUMPY
        + """
import numpy as np, torch
from keepmask import SamplingMask, replay
from keepmask.outputs import Rollout
from keepmask.replay import objectives, outside, ratios, stats
from keepmask.wire.peers import rollouts_from_vllm

params = {"temperature": 0.5, "frequency_penalty": 0.2, "logit_bias": {3: 1.0}}
choice = {"index": 0, "token_ids": [3, 4, 5], "sampling_mask": [[3, 7], [4], [1, 5, 9]], "finish_reason": "stop"}
rollouts = rollouts_from_vllm({"prompt_token_ids": [1, 2], "choices": [choice]}, sampling_params=params)
batch = replay.ReplayBatch.pack(rollouts, vocab_size=10)
for dtype in (torch.float32, torch.bfloat16):
    hidden = torch.randn(3, 4).to(dtype).requires_grad_()
    weight = torch.randn(10, 4).to(dtype).requires_grad_()
    scores = replay.logprobs_from_hidden(
        hidden, weight, batch.targets, batch.support, transforms=batch.transforms, entropy="grad",
        full_log_normalizer=True,
    )
    z = hidden.double() @ weight.double().T
    z[:, 3] += 1
    z[2, 4] -= 0.2
    z[1:, 3] -= 0.2
    z = z / 0.5
    torch.testing.assert_close(scores.logprobs[0].double(), z[0, [3, 7]].log_softmax(0)[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(scores.logprobs[2].double(), z[2, [1, 5, 9]].log_softmax(0)[1], atol=1e-5, rtol=0)
    loss = objectives.dapo(scores.logprobs, scores.logprobs.detach(), torch.ones(3), batch.loss_mask).loss
    (loss + stats.entropy(scores.member_logprobs, batch.support).sum()).backward()
    assert hidden.grad.isfinite().all() and weight.grad.abs().sum() > 0
table = replay.logprobs_from_logits(z.detach(), batch.targets, batch.support)
ratios.tis(table.logprobs, table.logprobs, batch.loss_mask)
generator = torch.Generator().manual_seed(0)
outside.estimate_mass_outside(
    hidden, weight, batch.targets, batch.support, num_samples=2, generator=generator, transforms=batch.transforms
)
rollout = Rollout(prompt_token_ids=np.array([1]), token_ids=np.array([3]), logprobs=np.zeros(1, np.float32))
assert replay.measure_mismatch([rollout], [[0.0]]).table()["num_tokens"] == 1
"""
    )


@pytest.mark.parametrize("name", keepmask.__all__)
def test_every_public_name_resolves(name):
    assert getattr(keepmask, name).__name__.split(".")[-1] == name
    assert name in dir(keepmask)


NUMPY_ALONE = """
import sys
for name in ("torch", "transformers", "tokenizers", "safetensors", "pydantic", "pyarrow", "numba", "rich", "jinja2"):
    sys.modules[name] = None  # importing it now fails
import keepmask
for module, names in ((keepmask, keepmask.__all__), (keepmask.replay, keepmask.replay.__all__)):
    for name in names:
        try:
            getattr(module, name)
        except ModuleNotFoundError as error:
            print(f"{error}")
"""


def test_a_name_whose_libraries_are_missing_says_which_extra_brings_them():
    said = run(NUMPY_ALONE).splitlines()
    assert "keepmask.LLM needs pydantic, which is not installed; run: pip install 'keepmask[engine]'" in said
    assert "keepmask.SamplingParams needs pydantic, which is not installed; run: pip install 'keepmask[engine]'" in said
    for name in ("ReplayBatch", "logprobs_from_hidden", "objectives", "stats", "Support"):
        assert (
            f"keepmask.replay.{name} needs torch, which is not installed; run: pip install 'keepmask[replay]'" in said
        )
    assert all("is not installed; run: pip install 'keepmask[" in line for line in said)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'keepmask' has no attribute 'LLm'"):
        keepmask.LLm  # noqa: B018


def test_the_package_says_that_it_is_typed():
    from importlib.resources import files

    assert files("keepmask").joinpath("py.typed").is_file()
