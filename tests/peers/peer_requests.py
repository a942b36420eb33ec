"""The table of requests that a peer and keepmask are both sent: all fields of all routes, legal, neutral, null, wrong.

All of them carry a `logit_bias` that leaves one id, `DRAWN`, with all the mass, unless the field in question is in the
way of it. So draws, texts, counts and reasons of ending are the same on any engine, and can be compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["DRAWN", "Asked", "sglang_requests", "vllm_requests"]

DRAWN = 72
"""The id that is drawn: "f" in the tiny tokenizer."""
OTHER = 73
_PROMPT = [5, 6, 7, 8]
_TEXT = "abc"
_MESSAGES = [{"role": "user", "content": "abc"}]
_BIAS = {str(DRAWN): 90.0}

Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. setting: how its server is started, "plain" or "masks"."""

    name: str
    path: str
    body: Body | None
    setting: str = "plain"
    method: str = "POST"


def vllm_requests() -> list[Asked]:
    """What vLLM is sent: each setting's requests in the order they are sent in."""
    return [*_plain(), *_masks()]


def sglang_requests() -> list[Asked]:
    """What SGLang is sent."""
    return list(_sglang())


# vLLM

_OPENAI_SAMPLING: Mapping[str, Sequence[Any]] = {
    "n": (1, 2, None, 0, -1, 1.5, "2"),
    "temperature": (0, 0.5, 1, 2, None, 0.001, -0.1, 2.1, "hot"),
    "top_p": (0.5, 1, None, 0, 1.1),
    "top_k": (1, 3, 0, -1, None, -2, 1.5, 10**6),
    "min_p": (0, 0.5, 1, None, -0.1, 1.1),
    "repetition_penalty": (1, 1.2, None, 0, -1),
    "presence_penalty": (0, 1.5, None, 2.5, "x"),
    "frequency_penalty": (0, 1.5, None, -2.5),
    "seed": (7, 0, -1, None, "x"),
    "stop": ("f", ["f"], [], None, "", [""], "zz", 5),
    "stop_token_ids": ([DRAWN], [], None, [-1], [10**6], "x"),
    "include_stop_str_in_output": (True, False, None),
    "ignore_eos": (True, False, None),
    "min_tokens": (0, 2, 4, -1, None),
    "skip_special_tokens": (True, False, None),
    "spaces_between_special_tokens": (True, False, None),
    "logit_bias": ({str(DRAWN): 90}, {}, None, {"x": 1}, {"999999": 1}, {str(DRAWN): 101}, {"-1": 1}),
    "allowed_token_ids": ([DRAWN], [DRAWN, OTHER], None, [], [999999], [-1]),
    "bad_words": (["g"], [], None, [""]),
    "logprob_token_ids": (None, [], [DRAWN, OTHER]),
    "thinking_token_budget": (None, -1, 2),
    "prompt_logprobs": (0, 2, None, -1, -2, 99),
    "watermarking": (None, False),
    "repetition_detection": (None, {"max_pattern_size": 2, "min_pattern_size": 1, "min_count": 2}, {}),
}
_OPENAI_COMMON: Mapping[str, Sequence[Any]] = {
    "model": ("tiny", None, "other"),
    "stream_options": (None, {"include_usage": True}),
    "user": ("me", None),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "truncate_prompt_tokens": (None, -1, 2),
    "truncation_side": (None, "left", "middle"),
    "add_special_tokens": (True, False, None),
    "response_format": (None, {"type": "text"}, {"type": "other"}),
    "structured_outputs": (None,),
    "priority": (0, None, 1, "x"),
    "request_id": ("mine", None, ""),
    "session_id": ("mine", None),
    "return_tokens_as_token_ids": (True, False, None),
    "return_token_ids": (True, False, None),
    "routed_experts_prompt_start": (0, 3, None, -1),
    "return_token_offsets": (True, False, None),
    "cache_salt": ("salt", None, ""),
    "kv_transfer_params": (None,),
    "ec_transfer_params": (None,),
    "vllm_xargs": (None, {}, {"a": 1}),
    "stream_interval": (None, 2, 0),
    "return_mm_kwargs": (None,),
    "mm_payload": ("tensors", "none"),
    "unknown_field": (1,),
}
_COMPLETION: Mapping[str, Sequence[Any]] = {
    "prompt": (
        *(_TEXT, [5, 6], [[5, 6], [7]], ["a", "b"], "", [], [[]], [""], None, [-1], [999999], [1.5], 7),
        ["a", [5]],
    ),
    "max_tokens": (1, 3, None, 0, -1, 10**6),
    "logprobs": (0, 1, 3, None, -1, 21, True),
    "echo": (False, None, True),
    "suffix": (None, "x"),
    "best_of": (None, 1),
}
_CHAT: Mapping[str, Sequence[Any]] = {
    "messages": (
        _MESSAGES,
        [{"role": "system", "content": "s"}, *_MESSAGES],
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        [{"role": "user", "content": ""}],
        [{"role": "other", "content": "x"}],
        [{"role": "user"}],
        [{"content": "x"}],
        [],
        None,
        "x",
        [*_MESSAGES, {"role": "assistant", "content": "x"}, *_MESSAGES],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]}],
    ),
    "max_tokens": (1, 0, -1, 10**6),
    "max_completion_tokens": (2, None, 0),
    "logprobs": (True, False, None),
    "top_logprobs": (0, None, 2),
    "tools": (None, [], [{"type": "function", "function": {"name": "f", "parameters": {}}}]),
    "tool_choice": ("none", None, "auto", "required"),
    "parallel_tool_calls": (True, False, None),
    "reasoning_effort": (None, "low", "x"),
    "include_reasoning": (True, False),
    "echo": (False, True),
    "add_generation_prompt": (True, False, None),
    "continue_final_message": (False, True),
    "documents": (None,),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}, {"enable_thinking": False}),
    "mm_processor_kwargs": (None,),
    "media_io_kwargs": (None,),
    "return_prompt_text": (None, True, False),
}
_GENERATE: Mapping[str, Sequence[Any]] = {
    "token_ids": ([5, 6], [], None, [-1], [999999], "x", [1.5], [True], [5] * 509, [5] * 510, [5] * 600),
    "model": ("tiny", None, "other"),
    "request_id": ("mine", None, ""),
    "token_offsets": (None, [[0, 1], [1, 2], [2, 3], [3, 4]]),
    "features": (None,),
    "content_parts": (None, []),
    "reasoning_ended": (None, True, False),
    "reasoning_parser_kwargs": (None, {"chat_template_kwargs": {}}, {}),
    "return_token_ids": (True, False, None),
    "output_mode": ("tokens", "text", None, "other"),
    "stream_options": (None, {"include_usage": True}),
    "cache_salt": ("salt", None, ""),
    "priority": (0, None, 1),
    "kv_transfer_params": (None,),
    "ec_transfer_params": (None,),
    "unknown_field": (1,),
}
_GENERATE_SAMPLING: Mapping[str, Sequence[Any]] = {
    **_OPENAI_SAMPLING,
    "max_tokens": (1, 3, 0, -1),
    "logprobs": (0, 1, 3, None, -1, 21, True, -2),
    "prompt_logprob_start": (None, 0, 1),
    "prompt_logprob_token_ids": (None, [[DRAWN], [DRAWN], [DRAWN]]),
    "flat_logprobs": (False, True),
    "detokenize": (True, False, None),
    "output_kind": (0, 1, 2, None, 3),
    "stream_interval": (None, 2, 0),
    "skip_clone": (False, True),
    "structured_outputs": (None,),
    "extra_args": (None, {}, {"a": 1}),
    "skip_reading_prefix_cache": (None, True, False),
    "routed_experts_prompt_start": (0, 3, None, -1),
    "return_token_ids": (True,),
    "output_text_buffer_length": (0, 3),
    "trace_decode_token_ids": (None, [DRAWN, OTHER]),
    "unknown_field": (1,),
}
_STREAM = {"stream": True}


def _plain() -> Iterator[Asked]:
    """A server as it is started without flags."""
    for path in ("/health", "/version", "/v1/models", "/ping", "/load", "/is_paused", "/server_info", "/no_such_route"):
        yield Asked(f"GET {path}", path, None, method="GET")
    completion = {"prompt": _TEXT, "max_tokens": 3, "logit_bias": _BIAS, "seed": 7}
    yield from _table("/v1/completions", completion, {**_COMPLETION, **_OPENAI_SAMPLING, **_OPENAI_COMMON})
    chat = {"messages": _MESSAGES, "max_tokens": 3, "logit_bias": _BIAS, "seed": 7}
    yield from _table("/v1/chat/completions", chat, {**_CHAT, **_OPENAI_SAMPLING, **_OPENAI_COMMON})
    yield from _together(completion, chat)
    yield from _without_masks()
    yield from _tokenize()


def _together(completion: Body, chat: Body) -> Iterator[Asked]:
    """Fields that mean something only with others, and streams."""
    path = "/v1/completions"
    changes: Mapping[str, Body] = {
        "stream": {},
        "stream usage": {"stream_options": {"include_usage": True}},
        "stream usage each": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        "stream n=2": {"n": 2},
        "stream logprobs": {"logprobs": 2},
        "stream ids": {"return_token_ids": True},
        "stream echo": {"echo": True},
        "stream stop": {"stop": "f"},
        "stream two prompts": {"prompt": ["a", "b"]},
        "stream interval": {"stream_interval": 2},
        "stream too long": {"prompt": [5] * 600},
    }
    for name, change in changes.items():
        yield Asked(f"{path} {name}", path, {**completion, **_STREAM, **change})
    whole: Mapping[str, Body] = {
        "echo max_tokens=0": {"echo": True, "max_tokens": 0},
        "echo logprobs max_tokens=0": {"echo": True, "logprobs": 1, "max_tokens": 0},
        "echo logprobs max_tokens=1": {"echo": True, "logprobs": 1, "max_tokens": 1},
        "echo ids logprobs": {"prompt": _PROMPT, "echo": True, "logprobs": 1},
        "logprobs as ids": {"logprobs": 1, "return_tokens_as_token_ids": True},
        "300 prompts": {"prompt": [[5 + i % 7, 6] for i in range(300)], "max_tokens": 1},
        "too long": {"prompt": [5] * 600},
        "fills the context": {"prompt": [5] * 510},
        "stop in text": {"stop": "ff"},
        "stop in text, kept": {"stop": "ff", "include_stop_str_in_output": True},
        "stop token": {"stop_token_ids": [DRAWN]},
        "eos": {"logit_bias": {"2": 90}},
        "eos ignored": {"logit_bias": {"2": 90}, "ignore_eos": True},
        "special tokens": {"logit_bias": {"1": 90}, "skip_special_tokens": False},
        "prompt_logprobs and ids": {"prompt_logprobs": 1, "return_token_ids": True},
        "two prompts with n=2": {"prompt": ["a", "b"], "n": 2},
        "stream_options without stream": {"stream_options": {"include_usage": True}},
        "text that ends within a character": {"logit_bias": {"200": 90}},
    }
    for name, change in whole.items():
        yield Asked(f"{path} {name}", path, {**completion, **change})
    path = "/v1/chat/completions"
    chat_streams: Mapping[str, Body] = {
        "stream": {},
        "stream usage": {"stream_options": {"include_usage": True}},
        "stream usage each": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        "stream n=2": {"n": 2},
        "stream logprobs": {"logprobs": True, "top_logprobs": 2},
        "stream ids": {"return_token_ids": True},
        "stream stop": {"stop": "f"},
        "stream too long": {"messages": [{"role": "user", "content": "a" * 600}]},
    }
    for name, change in chat_streams.items():
        yield Asked(f"{path} {name}", path, {**chat, **_STREAM, **change})
    chat_whole: Mapping[str, Body] = {
        "top_logprobs": {"logprobs": True, "top_logprobs": 3},
        "top_logprobs=0 with logprobs": {"logprobs": True, "top_logprobs": 0},
        "top_logprobs=21": {"logprobs": True, "top_logprobs": 21},
        "top_logprobs=-1": {"logprobs": True, "top_logprobs": -1},
        "logprobs as ids": {"logprobs": True, "return_tokens_as_token_ids": True},
        "continued": {
            "messages": [*_MESSAGES, {"role": "assistant", "content": "x"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
        "both ends": {"continue_final_message": True, "add_generation_prompt": True},
        "tools and none": {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
            "tool_choice": "none",
        },
        "too long": {"messages": [{"role": "user", "content": "a" * 600}]},
        "max_tokens=null": {"messages": [{"role": "user", "content": "a" * 488}], "max_tokens": None},
        "max_completion_tokens wins": {"max_tokens": 1, "max_completion_tokens": 2},
        "stop in text": {"stop": "ff"},
        "eos": {"logit_bias": {"2": 90}},
        "prompt_logprobs": {"prompt_logprobs": 1, "return_token_ids": True},
    }
    for name, change in chat_whole.items():
        yield Asked(f"{path} {name}", path, {**chat, **change})


def _without_masks() -> Iterator[Asked]:
    path = "/inference/v1/generate"
    sampling: Body = {"max_tokens": 3, "logit_bias": _BIAS, "seed": 7}
    changes: Mapping[str, Body] = {
        "greedy": {"temperature": 0},
        "greedy with logprobs": {"temperature": 0, "logprobs": 1},
        "plain": {},
        "prompt_logprobs": {"prompt_logprobs": 1},
        "n=2": {"n": 2},
        "eos": {"logit_bias": {"2": 90}},
    }
    for name, change in changes.items():
        yield Asked(
            f"{path} without masks, {name}", path, {"token_ids": _PROMPT, "sampling_params": {**sampling, **change}}
        )


def _tokenize() -> Iterator[Asked]:
    path = "/tokenize"
    for body in (
        {"prompt": "abc"},
        {"prompt": ""},
        {"prompt": "abc", "add_special_tokens": False},
        {"prompt": "abc", "return_token_strs": True},
        {"prompt": "abc", "model": "other"},
        {"messages": _MESSAGES},
        {"messages": _MESSAGES, "add_generation_prompt": False},
        {},
        {"prompt": 5},
    ):
        yield Asked(f"{path} {json.dumps(body)}", path, body)
    path = "/detokenize"
    for body in ({"tokens": [72, 73]}, {"tokens": []}, {"tokens": [999999]}, {"tokens": [-1]}, {"tokens": "x"}, {}):
        yield Asked(f"{path} {json.dumps(body)}", path, body)


def _masks() -> Iterator[Asked]:
    """A server that returns masks with every token."""
    path, setting = "/inference/v1/generate", "masks"
    sampling: Body = {"max_tokens": 3, "top_k": 3, "logit_bias": _BIAS, "seed": 7}
    base: Body = {"token_ids": _PROMPT, "sampling_params": sampling}
    yield from _table(path, base, _GENERATE, setting=setting)
    for name, values in _GENERATE_SAMPLING.items():
        for value in values:
            yield Asked(
                f"{path} sampling_params.{name}={_shown(value)}",
                path,
                {**base, "sampling_params": {**sampling, name: value}},
                setting,
            )
    for name, params in {
        "stop token": {"stop_token_ids": [DRAWN]},
        "stop string": {"stop": "ff"},
        "eos": {"logit_bias": {"2": 90}},
        "eos ignored": {"logit_bias": {"2": 90}, "ignore_eos": True},
        "greedy": {"temperature": 0},
        "no top_k": {"top_k": 0},
        "one allowed": {"allowed_token_ids": [DRAWN], "logprobs": 2},
        "top_p and min_p": {"top_p": 0.9, "min_p": 0.1, "logprobs": 3},
        "n=3": {"n": 3, "logprobs": 1},
        "prompt_logprobs": {"prompt_logprobs": 1},
    }.items():
        asked = {**base, "sampling_params": {**sampling, **params}}
        yield Asked(f"{path} {name}", path, asked, setting)
        yield Asked(f"{path} stream {name}", path, {**asked, **_STREAM}, setting)
    for name, change in {
        "usage": {"stream_options": {"include_usage": True}},
        "usage each": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        "ids": {"return_token_ids": True},
        "text": {"output_mode": "text"},
        "too long": {"token_ids": [5] * 600},
    }.items():
        yield Asked(f"{path} stream {name}", path, {**base, **_STREAM, **change}, setting)
    for value in (None, 10**6):
        asked = _with(base, {"max_tokens": value}, token_ids=[5] * 507)
        yield Asked(f"{path} sampling_params.max_tokens={_shown(value)}", path, asked, setting)
    yield Asked(f"{path} no sampling_params", path, {"token_ids": _PROMPT}, setting)
    yield Asked(f"{path} empty sampling_params", path, {"token_ids": _PROMPT, "sampling_params": {}}, setting)
    yield Asked(f"{path} text with logprobs", path, _with(base, {"logprobs": 2}, output_mode="text"), setting)
    yield Asked(
        f"{path} text without detokenize", path, _with(base, {"detokenize": False}, output_mode="text"), setting
    )
    completion = {"prompt": _TEXT, "max_tokens": 2, "top_k": 3, "logit_bias": _BIAS}
    yield Asked("/v1/completions with masks", "/v1/completions", {**completion, "logprobs": 1}, setting)
    chat = {"messages": _MESSAGES, "max_tokens": 2, "top_k": 3, "logit_bias": _BIAS, "logprobs": True}
    yield Asked("/v1/chat/completions with masks", "/v1/chat/completions", chat, setting)
    for body in ({"request_ids": ["nobody"]}, {"request_ids": []}, {}):
        yield Asked(f"abort {json.dumps(body)}", "/inference/v1/abort_requests", body, setting)


# SGLang

_SGLANG_SAMPLING: Mapping[str, Sequence[Any]] = {
    "max_new_tokens": (1, 3, None, 0, -1, 10**6),
    "min_new_tokens": (0, 2, 4, -1, None),
    "n": (1, 2, 0),
    "temperature": (0, 0.5, 1, 2, None, -0.1, 3.0),
    "top_p": (0.5, 1, None, 0, 1.1),
    "top_k": (1, 3, -1, 1 << 30, None, 0, -2),
    "min_p": (0, 0.5, 1, None, -0.1, 1.1),
    "repetition_penalty": (1, 1.2, None, 0, 2.5),
    "presence_penalty": (0, 1.5, None, 2.5),
    "frequency_penalty": (0, 1.5, None, -2.5),
    "stop": ("f", ["f"], [], None, ""),
    "stop_token_ids": ([DRAWN], [], None),
    "stop_regex": (None,),
    "ignore_eos": (True, False, None),
    "skip_special_tokens": (True, False, None),
    "spaces_between_special_tokens": (True, False, None),
    "no_stop_trim": (True, False, None),
    "logit_bias": ({str(DRAWN): 90}, {}, None, {"x": 1}),
    "custom_params": (None, {}, {"a": 1}),
    "sampling_seed": (7, None),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "stream_interval": (None, 2),
    "unknown_field": (1,),
}
_SGLANG_OPENAI = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed"),
    *("stop", "stop_token_ids", "ignore_eos", "min_tokens", "skip_special_tokens", "logit_bias"),
)
_SGLANG: Mapping[str, Sequence[Any]] = {
    "input_ids": ([5, 6], [[5, 6], [7]], [], None, "x"),
    "rid": ("mine", None, ["mine"]),
    "return_logprob": (True, False, None, [True]),
    "logprob_start_len": (-1, 0, 2, None, 99),
    "top_logprobs_num": (0, 2, None),
    "token_ids_logprob": (None, [DRAWN, OTHER]),
    "return_text_in_logprobs": (True, False),
    "return_sampling_mask": (True, False, None, [True]),
    "sampling_logprobs_mode": ("selected", "support", None, "other", ["support"]),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "return_prompt_token_ids": (True, False),
    "return_bytes": (False,),
    "return_entropy": (False,),
    "image_data": (None,),
    "video_data": (None,),
    "audio_data": (None,),
    "input_embeds": (None,),
    "modalities": (None,),
    "lora_path": (None,),
    "lora_id": (None,),
    "session_params": (None,),
    "custom_logit_processor": (None,),
    "bootstrap_host": (None,),
    "bootstrap_port": (None,),
    "bootstrap_room": (None,),
    "data_parallel_rank": (None,),
    "priority": (None, 0, 1),
    "extra_key": (None, "k"),
    "no_logs": (True, False),
    "log_metrics": (True, False),
    "background": (False,),
    "conversation_id": (None, "c"),
    "stream": (False, None),
    "require_reasoning": (False,),
    "validation_time": (None,),
    "unknown_field": (1,),
}


def _sglang() -> Iterator[Asked]:
    for path in (
        *("/health", "/health_generate", "/v1/models", "/model_info", "/get_model_info", "/server_info"),
        *("/get_server_info", "/get_weight_version", "/weight_version", "/get_load", "/no_such_route"),
    ):
        yield Asked(f"GET {path}", path, None, method="GET")
    path = "/generate"
    sampling: Body = {"max_new_tokens": 3, "temperature": 1, "logit_bias": _BIAS}
    base: Body = {"input_ids": _PROMPT, "sampling_params": sampling}
    yield from _table(path, base, _SGLANG)
    for name, values in _SGLANG_SAMPLING.items():
        for value in values:
            yield Asked(
                f"{path} sampling_params.{name}={_shown(value)}",
                path,
                {**base, "sampling_params": {**sampling, name: value}},
            )
    masks: Body = {"return_sampling_mask": True, "return_logprob": True}
    with_mask = _with(base, {"top_k": 3}, **masks)
    for name, params in {
        "top_k": {},
        "top_p with a wide top_k": {"top_k": 500, "top_p": 0.9},
        "top_p alone": {"top_k": -1, "top_p": 0.9},
        "no filter": {"top_k": -1},
        "greedy": {"temperature": 0},
        "min_p": {"min_p": 0.1},
        "eos": {"logit_bias": {"2": 90}},
        "stop token": {"stop_token_ids": [DRAWN]},
        "stop string": {"stop": "ff"},
        "n=2": {"n": 2},
    }.items():
        asked = _with(with_mask, params)
        yield Asked(f"{path} mask, {name}", path, asked)
        yield Asked(f"{path} mask, support, {name}", path, {**asked, "sampling_logprobs_mode": "support"})
        yield Asked(f"{path} stream mask, {name}", path, {**asked, **_STREAM})
    for name, change in {
        "text": {"input_ids": None, "text": _TEXT},
        "text and input_ids": {"text": _TEXT},
        "two texts": {"input_ids": None, "text": ["a", "b"]},
        "neither": {"input_ids": None},
        "two prompts, two params": {"input_ids": [[5], [6]], "sampling_params": [sampling, sampling]},
        "two prompts, lists": {
            "input_ids": [[5], [6]],
            "return_logprob": [True, False],
            "logprob_start_len": [-1, -1],
            "top_logprobs_num": [1, 0],
        },
        "two masks": {
            "input_ids": [[5], [6]],
            "sampling_params": {**sampling, "top_k": 3},
            "return_sampling_mask": [True, True],
            "sampling_logprobs_mode": ["support", "support"],
        },
        "too long": {"input_ids": [5] * 600},
        "logprobs": {"return_logprob": True},
        "logprobs of the prompt": {"return_logprob": True, "logprob_start_len": 0},
        "logprobs, top": {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0},
        "logprobs, text": {"return_logprob": True, "return_text_in_logprobs": True},
        "logprobs of ids": {"return_logprob": True, "token_ids_logprob": [DRAWN, OTHER]},
        "no params": {"sampling_params": None},
        "stream": _STREAM,
        "stream logprobs": {**_STREAM, "return_logprob": True, "top_logprobs_num": 1},
        "stream two prompts": {**_STREAM, "input_ids": [[5], [6]]},
        "stream too long": {**_STREAM, "input_ids": [5] * 600},
        "stream refused": {**_STREAM, "sampling_params": {**sampling, "top_p": 1.5}},
        "stream n=2": {**_STREAM, "sampling_params": {**sampling, "n": 2}},
    }.items():
        yield Asked(f"{path} {name}", path, {**base, **change})
    for body in ({"rid": "nobody"}, {"abort_all": False}, {}):
        yield Asked(f"/abort_request {json.dumps(body)}", "/abort_request", body)
    yield Asked("/flush_cache", "/flush_cache", {})
    yield Asked("GET /flush_cache", "/flush_cache", None, method="GET")
    for name in ("/pause_generation", "/continue_generation"):
        yield Asked(name, name, {})
    completion = {"model": "tiny", "prompt": _TEXT, "max_tokens": 3, "logit_bias": _BIAS}
    shared = {name: _OPENAI_SAMPLING[name] for name in _SGLANG_OPENAI}
    yield from _table("/v1/completions", completion, shared)
    yield Asked("/v1/completions", "/v1/completions", completion)
    yield Asked("/v1/completions stream", "/v1/completions", {**completion, **_STREAM})
    chat = {"model": "tiny", "messages": _MESSAGES, "max_tokens": 3, "logit_bias": _BIAS}
    yield Asked("/v1/chat/completions", "/v1/chat/completions", chat)
    yield Asked("/v1/chat/completions stream", "/v1/chat/completions", {**chat, **_STREAM})


# Building


def _table(path: str, base: Body, table: Mapping[str, Sequence[Any]], *, setting: str = "plain") -> Iterator[Asked]:
    for name, values in table.items():
        for value in values:
            yield Asked(f"{path} {name}={_shown(value)}", path, {**base, name: value}, setting)


def _with(base: Body, params: Body, **fields: Any) -> Body:
    return {**base, **fields, "sampling_params": {**base["sampling_params"], **params}}


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:50]}… ({len(value)})"
