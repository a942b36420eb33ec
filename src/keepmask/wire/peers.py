"""Masks and rollouts of other programs: vLLM, SGLang, verifiers, prime-rl, slime, miles and SkyRL."""

from keepmask.wire.peer_masks import (
    from_ids_counts,
    from_ids_offsets,
    from_sglang,
    from_skyrl,
    from_skyrl_packed,
    from_slime,
    from_verifiers,
    from_vllm,
    to_ids_counts,
    to_skyrl,
    to_slime,
)
from keepmask.wire.peer_rollouts import rollouts_from_flat, rollouts_from_sglang, rollouts_from_vllm

__all__ = [
    "from_ids_counts",
    "from_ids_offsets",
    "from_sglang",
    "from_skyrl",
    "from_skyrl_packed",
    "from_slime",
    "from_verifiers",
    "from_vllm",
    "rollouts_from_flat",
    "rollouts_from_sglang",
    "rollouts_from_vllm",
    "to_ids_counts",
    "to_skyrl",
    "to_slime",
]
