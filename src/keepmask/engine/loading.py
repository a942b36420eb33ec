"""Models and tokenizers: from a name to what the engine runs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from keepmask.config import EngineConfig
from keepmask.engine.policy_weights import copy_changed, policy_weights
from keepmask.errors import ConfigError
from keepmask.forward import attention
from keepmask.models import bundled

__all__ = [
    "checkpoint",
    "copy_model",
    "device_of",
    "dtype_of",
    "eos_token_ids",
    "layer_settings",
    "load_model",
    "load_tokenizer",
    "unmapped_token_ids",
]

_LEGAL = f"give a checkpoint folder, a Hugging Face hub id, or a packaged model: {', '.join(bundled.NAMES)}"

_LINE_BYTES = 64

_MAX_LISTED = 4  # missing weights named in one error


def checkpoint(name: str, dtype: torch.dtype = torch.float32) -> str:
    """Folder or hub id to load `name` from; packaged models are converted on first use, to this type.

    Raises ConfigError for a path to no folder.
    """
    if name in bundled.NAMES:
        return str(bundled.path(name, dtype=str(dtype).removeprefix("torch.")))
    folder = Path(name).expanduser()
    if folder.is_dir():
        return str(folder)
    if folder.is_absolute() or name.startswith((".", "~")):
        raise ConfigError(f"model {name!r}: there is no such folder; {_LEGAL}")
    return name


def device_of(config: EngineConfig) -> torch.device:
    """The device the configuration asks for. Raises ConfigError when it is not there."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda': no CUDA device is available; use device='cpu' or 'auto'")
    return torch.device("cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu")


def dtype_of(config: EngineConfig, device: torch.device) -> torch.dtype:
    """The type the configuration asks for; auto is bfloat16 where the device computes it natively."""
    if config.dtype != "auto":
        return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[config.dtype]
    if device.type == "cuda":
        return torch.bfloat16
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32


def load_model(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """The model, in eval mode, with its attention going through the paged cache.

    Raises ConfigError naming the model when it cannot be loaded or does not support the attention interface.
    """
    attention.register()
    source = checkpoint(config.model, dtype)
    options: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    try:
        settings = AutoConfig.from_pretrained(source, **options)
        _refuse_unsupported(config.model, settings)
        _refuse_moving_rotation(config, settings)
        model, found = AutoModelForCausalLM.from_pretrained(
            source,
            config=settings,
            dtype=dtype,
            attn_implementation=attention.NAME,
            output_loading_info=True,
            use_safetensors=True,  # never a pickle
            **options,
        )
    except ConfigError:
        raise
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, SafetensorError) as error:
        if isinstance(error, KeyError) and error.args == (attention.NAME,):  # looked up among its own attentions
            raise ConfigError(
                f"model {config.model!r} ({settings.model_type}): is not supported: its layers do not go through "
                "transformers' attention interface"
            ) from error
        where = "" if source == config.model else f" from {source}"
        raise ConfigError(f"model {config.model!r}: cannot be loaded{where}: {_reason(error)}; {_LEGAL}") from error
    if missing := sorted(found["missing_keys"]):
        shown = ", ".join(missing[:_MAX_LISTED]) + (", ..." if len(missing) > _MAX_LISTED else "")
        raise ConfigError(
            f"model {config.model!r}: {len(missing)} of its weights are not in the checkpoint: {shown}; "
            "use a complete checkpoint of this architecture"
        )
    return _prepared(model, config.model, device)


def copy_model(config: EngineConfig, module: nn.Module, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A model of its own with the weights of a trainer's module, adapters merged; neither writes into the other's.

    Raises ConfigError when it is no causal language model of transformers, or not one that `load_model` would take.
    """
    attention.register()
    base: Any = module.get_base_model() if hasattr(module, "get_base_model") else module  # type: ignore[operator]
    if not isinstance(base, PreTrainedModel):
        raise ConfigError(f"model: {type(base).__name__} is no causal language model of transformers")
    settings = copy.deepcopy(base.config)
    _refuse_unsupported(config.model, settings)
    _refuse_moving_rotation(config, settings)
    model = AutoModelForCausalLM.from_config(settings, dtype=dtype, attn_implementation=attention.NAME)
    model.generation_config = copy.deepcopy(base.generation_config)
    copy_changed(model, lambda: policy_weights(module))
    return _prepared(model, config.model, device)


def _prepared(model: PreTrainedModel, name: str, device: torch.device) -> PreTrainedModel:
    if model.get_output_embeddings() is None:
        raise ConfigError(f"model {name!r} ({model.config.model_type}): has no language-model head")
    model = model.eval().requires_grad_(requires_grad=False).to(device)
    _align(model)
    return model


def _align(model: PreTrainedModel) -> None:
    """Move weights that do not start at a cache line, which also frees them of a file that they may be mapped from."""
    for parameter in model.parameters():
        if parameter.data_ptr() % _LINE_BYTES:
            parameter.data = parameter.data.clone()


def load_tokenizer(config: EngineConfig) -> Any | None:
    """The tokenizer, or None with skip_tokenizer_init. Raises ConfigError when it cannot be loaded."""
    if config.skip_tokenizer_init:
        return None
    source = checkpoint(config.tokenizer or config.model, dtype_of(config, device_of(config)))
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f"tokenizer of {config.model!r}: cannot be loaded from {source}: {_reason(error)}; "
            "give tokenizer=... or skip_tokenizer_init=True"
        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(f"tokenizer of {config.model!r}: needs a fast tokenizer (tokenizer.json)")
    return tokenizer


def eos_token_ids(model: PreTrainedModel, tokenizer: Any | None) -> tuple[int, ...]:
    """Every id that ends a completion: of the generation config, the model config and the tokenizer."""
    generation: GenerationConfig | None = getattr(model, "generation_config", None)
    found: set[int] = set()
    for value in (
        getattr(generation, "eos_token_id", None),
        getattr(model.config, "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    ):
        found |= {value} if isinstance(value, int) else set(value or ())
    return tuple(sorted(found))


def unmapped_token_ids(config: EngineConfig, tokenizer: Any | None, vocab_size: int) -> tuple[int, ...]:
    """With ban_unmapped_token_ids, the ids within the logits' width that the tokenizer knows nothing of."""
    if not config.ban_unmapped_token_ids:
        return ()
    if tokenizer is None:
        raise ConfigError(
            "ban_unmapped_token_ids=True with skip_tokenizer_init=True: only a tokenizer knows which ids it maps; "
            "set one of them to False"
        )
    return tuple(sorted(set(range(vocab_size)) - set(tokenizer.get_vocab().values())))


def layer_settings(text: Any, layer_idx: int) -> Any:
    """The config of one layer: transformers refuses to read, from a model's, what differs from layer to layer."""
    return text.per_layer_config[layer_idx] if getattr(text, "is_heterogeneous", False) else text


def _reason(error: Exception) -> str:
    """What an exception says, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(".")


def _refuse_unsupported(name: str, settings: Any) -> None:
    """Architectures whose layers are not all softmax attention over past tokens."""
    if getattr(settings, "is_encoder_decoder", False):
        raise ConfigError(f"model {name!r} ({settings.model_type}): encoder-decoder models are not supported")
    text = settings.get_text_config()
    for field in ("num_hidden_layers", "num_attention_heads", "hidden_size"):
        if not isinstance(getattr(layer_settings(text, 0), field, None), int):
            raise ConfigError(
                f"model {name!r} ({settings.model_type}): its config has no single {field}; only decoders whose layers "
                "are all attention of one shape are supported"
            )
    known = {"full_attention", "sliding_attention", "attention"}
    other = sorted(set(getattr(text, "layer_types", None) or ()) - known)
    if other:
        raise ConfigError(
            f"model {name!r} ({settings.model_type}): layers of type {', '.join(other)} are not supported"
        )


def _refuse_moving_rotation(config: EngineConfig, settings: Any) -> None:
    """longrope turns every key anew when a text outgrows the first context; keys in the cache cannot follow."""
    text = settings.get_text_config()
    max_model_len = config.max_model_len or getattr(text, "max_position_embeddings", None) or 0
    rotation = getattr(text, "rope_parameters", None) or {}
    for part in (rotation, *(each for each in rotation.values() if isinstance(each, dict))):
        limit = part.get("original_max_position_embeddings")
        if part.get("rope_type") == "longrope" and limit and max_model_len > limit:
            raise ConfigError(
                f"model {config.model!r} ({settings.model_type}): longrope is supported up to {limit} tokens; set "
                f"max_model_len={limit} or less"
            )
