"""What a server says of itself when it starts."""

from __future__ import annotations

from keepmask import __version__
from keepmask.server.service import Service

__all__ = ["summary"]


def summary(service: Service) -> str:
    """Model, memory, masks and access, one a line."""
    engine, config = service.engine.engine, service.config
    runner, settings = engine.runner, engine.config
    parameters = sum(parameter.numel() for parameter in runner.model.parameters()) / 1e6
    dtype = str(runner.dtype).removeprefix("torch.")
    port = config.port or "a free port"
    lines = {
        "serves": f"{service.model_name} at http://{config.host}:{port}",
        "weights": f"{parameters:,.1f} M parameters, {dtype} on {runner.device}",
        "context": f"{engine.max_model_len:,} tokens, {settings.max_num_seqs} completions at a time",
        "KV cache": f"{runner.kv_cache_bytes / 2**20:,.0f} MiB, {runner.num_blocks * settings.block_size:,} tokens",
        "masks": f"{'for every request' if settings.return_sampling_mask else 'where asked for'}, contract "
        f"{settings.sampling_mask_contract}, semantics {settings.sampling_semantics}, sent as {config.mask_format}",
        "logprobs": settings.logprobs_mode,
        "updates": _updates(service),
        "access": f"{len(config.api_keys)} API key(s)" if config.api_keys else "without a key, from this machine only",
    }
    return "\n".join([f"keepmask {__version__}", *(f"  {name:<10}{value}" for name, value in lines.items())])


def _updates(service: Service) -> str:
    config = service.config
    if not config.enable_weight_updates:
        return "off"
    source = f"request bodies and {config.weights_dir}" if config.weights_dir else "request bodies"
    return f"from {source}" + (", awaited before the first request" if config.await_weights else "")
