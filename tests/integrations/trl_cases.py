"""A tiny policy with a tokenizer, a dataset, a reward, and trainers over them."""

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from keepmask.integrations.trl import ReplayGRPOConfig, ReplayGRPOTrainer

PROMPTS = [f"say {word}" for word in ("ab", "cd", "ef", "gh", "ij", "kl", "mn", "op")]
COMMON = {
    "max_completion_length": 8,
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "max_steps": 3,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "bf16": False,
    "use_cpu": True,
    "disable_tqdm": True,
    "gradient_checkpointing": False,
    "top_p": 0.8,
    "top_k": 0,
}


def even_ids(completion_ids, **_):
    """The share of even token ids."""
    return [sum(token_id % 2 == 0 for token_id in ids) / len(ids) for ids in completion_ids]


def dataset():
    return Dataset.from_dict({"prompt": PROMPTS})


def policy(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32"), AutoTokenizer.from_pretrained(folder)


def trainer(folder, output, *, model=None, kind=ReplayGRPOTrainer, config=ReplayGRPOConfig, options=None, **args):
    own, tokenizer = policy(folder)
    if config is ReplayGRPOConfig:
        args = {"rollout_options": {"kv_cache_memory_bytes": 2**22}} | args
    return kind(
        own if model is None else model,
        args.pop("reward_funcs", even_ids),
        config(str(output), **COMMON | args),
        train_dataset=dataset(),
        processing_class=tokenizer,
        **options or {},
    )
