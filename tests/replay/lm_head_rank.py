"""One of two ranks with half a batch each: its averaged gradients must be half of those of the whole batch alone."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from keepmask import LLM, SamplingParams, replay


def main(wrapper, checkpoint, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    llm = LLM(checkpoint, dtype="float32", kv_cache_memory_bytes=2**22, skip_tokenizer_init=True, device="cpu",
              return_sampling_mask=True, logprobs_mode="processed_logprobs")  # fmt: skip
    params = [SamplingParams(top_p=0.8, max_tokens=6, seed=s, logprobs=0, ignore_eos=True) for s in range(2)]
    prompts = [{"prompt_token_ids": [3, 4, 5 + s]} for s in range(2)]
    rollouts = [out.rollouts()[0] for out in llm.generate(prompts, params, use_tqdm=False)]
    store = replay.MaskStore(512)
    store.add(rollouts)
    ids = torch.tensor([[*r.prompt_token_ids, *r.token_ids] for r in rollouts])
    labels = ids.clone()
    labels[:, :3] = -100

    def fresh():
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        replay.add_lm_head(model, store)
        return model

    alone = fresh()
    alone(input_ids=ids, labels=labels, fused_lm_head=True).log_probs.sum().backward()
    model = fresh()
    if wrapper == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh())
        if wrapper == "fsdp2-head":
            fully_shard(model.lm_head, mesh=mesh())
        wrapped = fully_shard(model, mesh=mesh())
    out = wrapped(input_ids=ids[rank : rank + 1], labels=labels[rank : rank + 1], fused_lm_head=True)
    torch.testing.assert_close(out.log_probs[0, 2:], torch.from_numpy(rollouts[rank].logprobs), atol=1e-5, rtol=0)
    out.log_probs.sum().backward()
    for (name, mine), whole in zip(model.named_parameters(), alone.parameters(), strict=True):
        grad = mine.grad.full_tensor() if hasattr(mine.grad, "full_tensor") else mine.grad
        torch.testing.assert_close(2 * grad, whole.grad, atol=1e-4, rtol=1e-4, msg=name)
    Path(folder, f"equal{rank}").touch()
    dist.barrier()
    os._exit(0)  # without the destructors of gloo's threads, which race at exit


def mesh():
    return dist.device_mesh.init_device_mesh("cpu", (2,))


if __name__ == "__main__":
    main(*sys.argv[1:4])
