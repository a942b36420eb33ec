"""One rank of `test_parallel`: scores with its share of the head, as one of 2 and as one of 3, and notes what it got.

torchrun ... vocab_parallel_rank.py FOLDER
"""

import sys
from itertools import product
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from replay_cases import ParallelProblem, score_rows
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from keepmask import MaskError
from keepmask.replay.parallel import VocabParallel


def share_of(problem, layout, group):
    parallel = VocabParallel(group=group, vocab_size=problem.weight.shape[0], layout=layout)
    return parallel, problem.weight[list(parallel.ids)].clone(), problem.bias[list(parallel.ids)].clone()


def score(problem, weight, bias, **options):
    hidden = problem.hidden.clone().requires_grad_()
    weight, bias = weight.requires_grad_(), bias.requires_grad_()
    options = problem.options | {"impl": "gather"} | options
    scores = score_rows(hidden, weight, problem.targets, problem.support, bias=bias, **options)
    problem.loss(scores).backward()
    values = {name: getattr(scores, name) for name in problem.values}
    return values | {"hidden_grad": hidden.grad, "weight_grad": weight.grad, "bias_grad": bias.grad}


def score_as_dtensors(problem, weight, bias, mesh, **options):
    placed = [
        DTensor.from_local(part, mesh, [Shard(0)], shape=whole.shape, stride=whole.stride(), run_check=False)
        for part, whole in ((weight, problem.weight), (bias, problem.bias))
    ]
    hidden = problem.hidden
    problem.hidden = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
    got = score(problem, *placed, **options)
    problem.hidden = hidden
    return {name: value.to_local() if isinstance(value, DTensor) else value for name, value in got.items()}


def refusals(problem, group):
    """Whether batches that differ between ranks are refused: another number of rows, another target."""
    parallel, weight, _ = share_of(problem, "contiguous", group)
    rank, wide = dist.get_rank(), problem.support.counts.argmax()
    start = problem.support.offsets[wide]
    batches = [torch.arange(problem.targets.numel() - rank), torch.arange(problem.targets.numel())]
    targets = [problem.targets, problem.targets.clone()]
    targets[1][wide] = problem.support.ids[start + rank]
    refused = []
    for rows, tokens in zip(batches, targets, strict=True):
        try:
            score_rows(
                problem.hidden[rows], weight, tokens[rows], problem.support.select(rows), vocab_parallel=parallel
            )
            refused.append(False)
        except MaskError as error:
            refused.append("the processes of the group score other tokens" in str(error))
    return refused


def in_group(group, mesh):
    """What this rank gets as one of the group, by case."""
    results = {}
    for name, problem in ParallelProblem.all().items():
        for layout in ("contiguous", "strided"):
            parallel, weight, bias = share_of(problem, layout, group)
            results[f"{name} {layout}"] = score(problem, weight, bias, vocab_parallel=parallel)
        _, weight, bias = share_of(problem, "contiguous", group)
        results[f"{name} dtensor"] = score_as_dtensors(problem, weight, bias, mesh)
    problem = ParallelProblem.all()["ragged"]
    parallel, weight, bias = share_of(problem, "strided", group)
    weight.main_grad = torch.ones_like(weight)
    added = score(problem, weight, bias, vocab_parallel=parallel, weight_grad="accumulate")
    results["ragged accumulate"] = {"hidden_grad": added["hidden_grad"], "weight_grad": weight.main_grad}
    _, weight, bias = share_of(problem, "contiguous", group)
    added = score_as_dtensors(problem, weight, bias, mesh, weight_grad="accumulate")
    results["ragged accumulate dtensor"] = {"weight_grad": added["weight_grad"]}
    for name, impl in product(("ragged", "tiny"), ("numba", "dense")):
        parallel, weight, bias = share_of(ParallelProblem.all()[name], "contiguous", group)
        results[f"{name} {impl}"] = score(ParallelProblem.all()[name], weight, bias, vocab_parallel=parallel, impl=impl)
    results["refused"] = {"messages": torch.tensor(refusals(problem, group))}
    _, weight, bias = share_of(problem, "contiguous", group)
    parallel = VocabParallel(group=group, vocab_size=problem.weight.shape[0], reduce_hidden=False)
    results["ragged part"] = {"hidden_grad": score(problem, weight, bias, vocab_parallel=parallel)["hidden_grad"]}
    return {f"{case}/{name}": value.detach().numpy() for case, got in results.items() for name, value in got.items()}


def main(folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for size in (2, 3):
        members = list(range(size))
        group, mesh = dist.new_group(members), DeviceMesh("cpu", members)
        if rank in members:
            np.savez(Path(folder) / f"{rank} of {size}.npz", **in_group(group, mesh))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
