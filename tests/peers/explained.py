"""Why keepmask answers otherwise than a peer where it does; docs/peers.md lists the same reasons."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from peer_answers import ABSENT, Difference
from peer_requests import Asked

__all__ = ["EXPLAINED", "Explained", "explanations"]


@dataclass(frozen=True, slots=True)
class Explained:
    """A kind of difference. where: a pattern of the place. asked: a pattern somewhere in the request's name."""

    reason: str
    where: str
    asked: str = ""
    peers: tuple[str, ...] = ("vllm", "sglang")
    applies: Callable[[Difference], bool] = lambda difference: True

    def covers(self, peer: str, asked: Asked, difference: Difference) -> bool:
        """Whether this is why they differ."""
        return (
            peer in self.peers
            and re.fullmatch(self.where, difference.where) is not None
            and re.search(self.asked, asked.name) is not None
            and self.applies(difference)
        )


def explanations(peer: str, asked: Asked, difference: Difference) -> Explained | None:
    """The first reason that covers the difference."""
    return next((one for one in EXPLAINED if one.covers(peer, asked, difference)), None)


def _extra(difference: Difference) -> bool:
    return difference.peer == ABSENT


def _null_or_absent(difference: Difference) -> bool:
    return {str(difference.peer), str(difference.ours)} == {"None", ABSENT}


def _not_status(difference: Difference) -> bool:
    return difference.where != "status"


def _peer_crashed(difference: Difference) -> bool:
    return difference.peer[0] == 500


def _closed(difference: Difference) -> bool:
    return difference.ours[0] == 403


def _statuses(peer: int, ours: int) -> Callable[[Difference], bool]:
    return lambda difference: (difference.peer[0], difference.ours[0]) == (peer, ours)


_REFUSED, _TAKEN = _statuses(200, 400), _statuses(400, 200)
_VERSIONS = r"(.*\.)?(version|owned_by|system_fingerprint)"
_TOKENS = r"(.*\.)?(token_ids\[\]|text|content|output_ids\[\])"
_SEED = r"(.*\.)?(seed|weight_versions|sampling_mask|created|model)"
_NOT_THERE = (
    "repetition_detection|truncate_prompt|logprob_token_ids|token_ids_logprob|logprobs of ids|priority|token_offsets|"
    "prompt_logprob_token_ids|skip_reading|return_prompt_text|reasoning_effort|echo=true|stream prompt_logprobs"
)
_CONVERTED = r'token_ids=\[true\]|n="2"|logprobs=true|: 101}|request_id=""|stop=""|n=0|token_offsets'

EXPLAINED = (
    Explained(
        "A field that is null for one is absent for the other: clients read both alike", ".*", applies=_null_or_absent
    ),
    Explained("Answers tell seed, supports, and weights, also where the peer's do not", _SEED, applies=_extra),
    Explained("Ids of completions with a mask come without being asked for", r"choices\[\]\.token_ids", "with masks"),
    Explained("A server tells its own name and version", _VERSIONS),
    Explained("There are no permissions to tell of", r"data\[\]\.permission"),
    Explained(
        "Tokens in log-probabilities have a name beside their id, which verifiers' renderers read",
        r".*logprobs\.content\[\](\.top_logprobs\[\])?\.(token|\[id\])|.*top_logprobs\[\]\[id\]",
    ),
    Explained(
        "top_logprobs holds as many likely ids as were asked for beside the drawn one, which vLLM counts among them",
        r"choices\[\]\.logprobs\.content\[\]\.top_logprobs\[\]",
        "greedy with logprobs",
    ),
    Explained(
        "No log-probability is told of ids outside the support; vLLM fills top_logprobs up with -9999",
        r"choices\[\]\.logprobs\.content\[\]\.top_logprobs\[\]",
        "one allowed|top_p and min_p",
    ),
    Explained(
        "text_offset counts characters of the text, also where tokens are named by their ids",
        r"choices\[\]\.logprobs\.text_offset\[\]",
        "logprobs as ids",
    ),
    Explained("Ids of the prompt come when they are asked for", r"event\.choices\[\]\.prompt_token_ids", "echo"),
    Explained(
        "Top log-probabilities of a prompt come when they are asked for", r".*input_top_logprobs", "", ("sglang",)
    ),
    Explained("Cached prompt tokens are counted in every usage", r".*(prompt_tokens_details|cached_tokens_details)"),
    Explained("SGLang's OpenAI routes add their own fields; ours are vLLM's", ".*", "/v1/", ("sglang",), _not_status),
    Explained("SGLang's OpenAI routes have ranges of their own; ours are vLLM's", "status", "/v1/", ("sglang",)),
    Explained(
        "Errors have one shape on every route, and param names the field as it was sent",
        r"error(\..*)?|message|object|type|code|detail",
        applies=_not_status,
    ),
    Explained(
        "A row of every id is marked as the whole vocabulary", r"choices\[\]\.sampling_mask\[\]\[\]", "top_k=1000000"
    ),
    Explained("Where nothing determines a draw, it is another", _TOKENS, "logit_bias=|no params"),
    Explained(
        "Unknown fields are refused unless --ignore-unknown-fields",
        "status",
        r'unknown_field|"a": 1|validation_time',
        applies=_REFUSED,
    ),
    Explained("Nothing is converted or clamped without a word", "status", _CONVERTED, applies=_REFUSED),
    Explained(
        "A field that cannot have an effect is refused",
        "status",
        "stream_options|stream_interval|max_completion",
        applies=_REFUSED,
    ),
    Explained("What is not supported is refused by name", "status", _NOT_THERE, applies=_REFUSED),
    Explained("A message has one of OpenAI's roles, and content", "status", "messages=", ("vllm",), _REFUSED),
    Explained("null stands for the default everywhere", "status", "=null", applies=_TAKEN),
    Explained(
        "What has a plain meaning is taken: high temperatures and penalties, top_k 0, no tools, a mode without a mask",
        "status",
        r"temperature=2\.1|repetition_penalty=2\.5|tools=\[\]|top_k=0|prompt_logprob_start=0|sampling_logprobs_mode",
        applies=_TAKEN,
    ),
    Explained("Masks need no top_k where top_p or min_p bounds them", "status|event.*", "top_p alone", ("sglang",)),
    Explained(
        "What the peer answers with an empty 500 is refused with words, or served", "status", applies=_peer_crashed
    ),
    Explained(
        "A stream that cannot begin is refused with a status, not with an event inside it",
        "status",
        "stream",
        applies=_REFUSED,
    ),
    Explained(
        "A completion that does not fit the context is refused, not shortened",
        "status",
        r"fills the context|max_tokens=1000000|\(510\)",
        applies=_REFUSED,
    ),
    Explained(
        "SGLang keeps two places of the context free",
        r"output_ids\[\]|meta_info\..*",
        "max_new_tokens=null",
        ("sglang",),
    ),
    Explained("Ids outside the vocabulary are refused", "status", "detokenize|abort", applies=_REFUSED),
    Explained(
        "Routes that tell or change the server's state are open with --enable-weight-updates and a key only",
        "status",
        "",
        applies=_closed,
    ),
    Explained("Load is told by /metrics", "status", "/load"),
    Explained("Answers without content are an empty JSON object", "kind"),
    Explained("Times inside SGLang's scheduler are not told", r".*response_sent_to_client_ts", "", ("sglang",)),
    Explained("Under Triton's interpreter vLLM counts padding in its ranks", r".*\brank", "", ("vllm",)),
    Explained("Completions that generate nothing count no tokens", r"usage\.(total|completion)_tokens", "max_tokens=0"),
)
"""Every reason."""
