"""SkyRL's RemoteInferenceClient, over /inference/v1/generate: tokens, log-probabilities, pausing."""

import asyncio
import sys

from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteGenerateClient


async def main(url: str, model: str) -> None:
    client = RemoteGenerateClient(proxy_url=url)
    try:
        result = await client.generate(
            prompt_token_ids=[504, 3575, 282, 4649, 314],
            sampling_params={
                "max_tokens": 6,
                "temperature": 1.0,
                "top_p": 0.9,
                "top_k": 50,
                "logprobs": 1,
                "output_kind": 2,
            },
            session_id="session",
            model="served",
            cache_salt="salt",
        )
    finally:
        await client.aclose()
    assert len(result.response_ids) == len(result.response_logprobs) == 6
    assert result.stop_reason == "length"
    (choice,) = result.raw_response["choices"]
    assert all(token_id in row for token_id, row in zip(result.response_ids, choice["sampling_mask"], strict=True))


asyncio.run(main(*sys.argv[1:]))
