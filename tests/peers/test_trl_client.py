"""TRL's VLLMClient, as its trainers use it with a vLLM server, on ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from peer_servers import save_tiny
from serving import Serving

trl_client = pytest.importorskip("trl.generation.vllm_client")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    folder = save_tiny(tmp_path_factory.mktemp("trl") / "tiny")
    with Serving(Path(folder), served_model_name="tiny") as serving, pytest.MonkeyPatch.context() as patch:
        # It asks for vLLM to be installed, of which only the transfer of weights over NCCL uses anything
        patch.setattr(trl_client, "is_vllm_available", lambda *arguments, **options: True)
        client = trl_client.VLLMClient(base_url=serving.url)
        yield client
        client.session.close()


@pytest.mark.parametrize("prompts", [["ab", "abc"], [[67, 68], [67, 68, 69]]])
def test_generate_returns_ids_and_logprobs_of_every_prompt(client, prompts):
    answer = client.generate(prompts, n=2, max_tokens=5, top_k=4, logprobs=0)
    assert [len(ids) for ids in answer["prompt_ids"]] == [2, 3]
    assert len(answer["completion_ids"]) == 4
    for ids, logprobs, named in zip(
        answer["completion_ids"], answer["logprobs"], answer["logprob_token_ids"], strict=True
    ):
        assert 1 <= len(ids) <= 5
        assert [entry[0] for entry in named] == ids
        assert all(entry[0] <= 0 for entry in logprobs)


def test_chat_returns_what_the_template_made_of_the_messages(client):
    messages = [[{"role": "user", "content": "ab"}], [{"role": "user", "content": "abc"}]]
    answer = client.chat(messages, max_tokens=4, top_k=4)
    assert len(answer["prompt_ids"][1]) == len(answer["prompt_ids"][0]) + 1
    assert len(answer["completion_ids"]) == len(answer["logprobs"]) == 2


def test_the_server_tells_trl_what_it_is(client):
    assert client.model == "tiny"
    assert client.get_server_info()["model_config"]["max_model_len"] == 512
