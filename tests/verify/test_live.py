"""Rollouts asked of a server: keepmask's own, on both routes, and servers that give no masks."""

import httpx
import pytest

from keepmask.conform.json_client import JsonClient
from keepmask.errors import BackendError
from keepmask.verify.live import ask

PARAMS = {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "max_tokens": 2}
VLLM = {
    "request_id": "1",
    "choices": [{"index": 0, "token_ids": [4], "sampling_mask": [[4, 7]], "finish_reason": "length",
                 "logprobs": {"content": [{"token_id": 4, "logprob": -0.7}]}}],
}  # fmt: skip
SGLANG = {
    "text": "", "output_ids": [4],
    "meta_info": {"output_token_sampling_mask": [[4, 7]], "output_token_sampling_logprobs": [[-0.6931472, -0.6931472]],
                  "finish_reason": {"type": "length"}},
}  # fmt: skip


def client(answer, seen):
    def handle(request):
        seen.append((request.url.path, httpx.Response(200, content=request.content).json()))
        return httpx.Response(200, json=answer)

    made = JsonClient("http://server")
    made._client = httpx.Client(transport=httpx.MockTransport(handle))
    return made


def test_both_routes_are_asked_as_their_engines_expect():
    seen = []
    (rollout,) = ask(client(VLLM, seen), "vllm", [[1, 2]], PARAMS)
    assert (rollout.prompt_token_ids.tolist(), rollout.sampling_params) == ([1, 2], PARAMS)
    asked = {**PARAMS, "logprobs": 1, "return_sampling_mask": True}
    assert seen == [("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": asked})]
    done = []
    rollouts = ask(client(SGLANG, seen), "sglang", [[1], [2]], PARAMS, on_progress=done.append)
    assert [r.sampling_mask.token_ids for r in rollouts] == [[[4, 7]]] * 2
    assert done == [1, 2]
    path, body = seen[-1]
    assert path == "/generate"
    assert body["sampling_params"] == {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "max_new_tokens": 2}


def test_answers_without_masks_say_how_to_start_the_server():
    bare = {"choices": [{"token_ids": [4], "logprobs": VLLM["choices"][0]["logprobs"]}]}
    with pytest.raises(BackendError, match=r"1 of 1 answers are without a mask .*start the server with --return-samp"):
        ask(client(bare, []), "vllm", [[1]], PARAMS)
    with pytest.raises(BackendError, match="an answer that cannot be used: choices"):
        ask(client({}, []), "vllm", [[1]], PARAMS)
