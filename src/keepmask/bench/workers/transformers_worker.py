"""Batched `generate` of transformers, on a line of JSON at a time: `python transformers_worker.py OPTIONS`.

OPTIONS: {"model", "dtype"}. A line of input has prompts, n, output, sampling.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints is no answer
    import torch
    import transformers

    options = json.loads(sys.argv[1])
    dtype = getattr(torch, options["dtype"])
    model = transformers.AutoModelForCausalLM.from_pretrained(options["model"], dtype=dtype).eval()
    model.generation_config.eos_token_id = None  # all completions have the full length
    print(json.dumps({"version": transformers.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        ids = torch.tensor(asked["prompts"])
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                max_new_tokens=asked["output"],
                num_return_sequences=asked["n"],
                pad_token_id=0,
                **asked["sampling"],
            )
        seconds = time.perf_counter() - start
        tokens = out[:, ids.shape[1] :].numel()
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=answers, flush=True)


if __name__ == "__main__":
    main()
