"""What vLLM and SGLang lack to start without a GPU. Python runs this first where the folder is on its path.

Triton: the published one has no backend for CPUs, and both engines ask which backend is active before they launch a
kernel. A stand-in named "cpu" answers; with TRITON_INTERPRET=1 Triton's interpreter then runs the kernels as they are.

torchvision: the published one is built for CUDA and does not register two operators without it, which its own import
trips over. SGLang imports it and uses nothing of it; they are declared when it is first looked for.
"""

import importlib.abc
import os
import sys


class _ActiveDriver:
    @staticmethod
    def is_active():
        return True


class _Backend:
    driver = _ActiveDriver
    compiler = None


class _DeclareOperators(importlib.abc.MetaPathFinder):
    library = None

    def find_spec(self, name, path, target=None):
        if name == "torchvision" and self.library is None:
            import torch

            type(self).library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return  # found as usual


if peer := os.environ.get("PEER_ON_CPU"):
    try:
        import triton.backends
    except ImportError:
        pass  # a child that has another environment
    else:
        triton.backends.backends["cpu"] = _Backend
    if peer == "sglang":
        sys.meta_path.insert(0, _DeclareOperators())
