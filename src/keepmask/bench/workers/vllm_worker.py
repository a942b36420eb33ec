"""vLLM, on a line of JSON at a time: `python vllm_worker.py OPTIONS`.

OPTIONS: {"model", "dtype", "max_model_len", "max_num_seqs", "eager"}. A line of input has prompts, n, output, sampling.
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
    import vllm
    from vllm import LLM, SamplingParams

    options = json.loads(sys.argv[1])
    llm = LLM(
        options["model"],
        dtype=options["dtype"],
        max_model_len=options["max_model_len"],
        max_num_seqs=options["max_num_seqs"],
        enforce_eager=options["eager"],
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
    )
    print(json.dumps({"version": vllm.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        params = SamplingParams(
            n=asked["n"], max_tokens=asked["output"], ignore_eos=True, logprobs=0, **asked["sampling"]
        )
        prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
        llm.reset_prefix_cache()
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=answers, flush=True)


if __name__ == "__main__":
    main()
