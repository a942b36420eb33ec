"""verifiers' TrainClient, which prime-rl trains through: two turns, with the fields that both add to sampling_params.

Run by `scripts/peers clients` in an environment of its own, with the server's address and the model's folder.
"""

import asyncio
import os
import sys

from verifiers.v1.clients.train import TrainClient
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.graph import prepare_turn
from verifiers.v1.trace import Trace
from verifiers.v1.types import SamplingConfig, UserMessage


async def main(url: str, model: str) -> None:
    os.environ["PEER_KEY"] = "any"
    client = TrainClient(TrainClientConfig(base_url=f"{url}/v1", api_key_var="PEER_KEY", renderer_model_name=model))
    trace = Trace.model_construct(nodes=[], calls=[], tools=[], mm_token_type_id_map={})
    messages = [UserMessage(content="What is 2 + 3?")]
    # A renderer that can bridge adds the second of these from the second turn on, prime-rl the first; SmolLM2 has none
    added = {"return_token_ids": True, "routed_experts_prompt_start": 4}
    sampling = SamplingConfig(temperature=1.0, top_p=0.9, max_tokens=8, top_k=50, seed=3, cache_salt="salt", **added)
    for _ in range(2):
        turn = prepare_turn(trace, messages)
        response = await client.get_response(ChatDialect(), {"model": "served"}, sampling, "session", turn)
        tokens = response.tokens
        num_tokens = len(tokens.completion_ids)
        assert num_tokens == len(tokens.completion_logprobs) == len(tokens.sampling_mask.counts) > 0
        assert response.finish_reason in ("stop", "length")
        turn.commit(response)
        messages = [*messages, response.message, UserMessage(content="And twice that?")]


asyncio.run(main(*sys.argv[1:]))
