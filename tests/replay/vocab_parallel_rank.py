"""One rank of `test_parallel`: scores the given problem with its share of the head and writes down what it got.

torchrun ... vocab_parallel_rank.py FOLDER
"""

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from replay_cases import ParallelProblem
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

from keepmask.replay.logprobs import logprobs_from_hidden
from keepmask.replay.parallel import VocabParallel


def share_of(problem, layout):
    parallel = VocabParallel(group=dist.group.WORLD, vocab_size=problem.weight.shape[0], layout=layout)
    return parallel, problem.weight[list(parallel.ids)].clone(), problem.bias[list(parallel.ids)].clone()


def score(problem, weight, bias, **options):
    hidden = problem.hidden.clone().requires_grad_()
    weight, bias = weight.requires_grad_(), bias.requires_grad_()
    scores = logprobs_from_hidden(
        hidden, weight, problem.targets, problem.support, bias=bias, **problem.options, **options
    )
    problem.loss(scores).backward()
    values = {name: getattr(scores, name) for name in problem.values}
    return values | {"hidden_grad": hidden.grad, "weight_grad": weight.grad, "bias_grad": bias.grad}


def main(folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    results = {}
    for name, problem in ParallelProblem.all().items():
        for layout in ("contiguous", "strided"):
            parallel, weight, bias = share_of(problem, layout)
            results[f"{name} {layout}"] = score(problem, weight, bias, vocab_parallel=parallel)
        _, weight, bias = share_of(problem, "contiguous")
        placed = [
            DTensor.from_local(part, mesh, [Shard(0)], shape=whole.shape, stride=whole.stride(), run_check=False)
            for part, whole in ((weight, problem.weight), (bias, problem.bias))
        ]
        hidden = problem.hidden
        problem.hidden = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
        got = score(problem, *placed)
        problem.hidden = hidden
        results[f"{name} dtensor"] = {
            key: value.to_local() if isinstance(value, DTensor) else value for key, value in got.items()
        }
    problem = ParallelProblem.all()["ragged"]
    parallel, weight, bias = share_of(problem, "strided")
    weight.main_grad = torch.ones_like(weight)
    added = score(problem, weight, bias, vocab_parallel=parallel, weight_grad="accumulate")
    results["ragged accumulate"] = {"hidden_grad": added["hidden_grad"], "weight_grad": weight.main_grad}
    part = VocabParallel(group=dist.group.WORLD, vocab_size=problem.weight.shape[0], reduce_hidden=False)
    own = score(problem, *share_of(problem, "contiguous")[1:], vocab_parallel=part)["hidden_grad"]
    results["ragged part"] = {"hidden_grad": own}
    np.savez(
        Path(folder) / f"{rank}.npz",
        **{f"{case}/{key}": value.detach().numpy() for case, got in results.items() for key, value in got.items()},
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
