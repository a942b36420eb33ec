"""Real clients on real weights: openai, renderers, curl, and the lines of docs/server.md."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import renderers
import renderers.client
from serving import Serving, events

from keepmask.models import bundled
from keepmask.wire import mask_from_fields

pytestmark = pytest.mark.e2e

KEY = "docs-key"
DOCUMENT = Path(__file__).parents[2] / "docs" / "server.md"


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """The packaged SmolLM2, with everything enabled."""
    checkpoint = bundled.path("smollm2-135m")
    weights = tmp_path_factory.mktemp("weights")
    (weights / "step-1").mkdir()
    engine = {"max_model_len": 512, "kv_cache_memory_bytes": 128 * 2**20, "dtype": "float32"}
    options: dict[str, Any] = {"api_keys": (KEY,), "enable_weight_updates": True, "weights_dir": str(weights)}
    for file in checkpoint.glob("*.safetensors"):
        shutil.copyfile(file, weights / "step-1" / file.name)
    with Serving("smollm2-135m", engine=engine, **options) as serving:
        yield serving


@pytest.fixture
def client(real: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def test_model_answers_greedily_what_it_knows(client: openai.OpenAI):
    answer = client.completions.create(
        model="smollm2-135m", prompt="The capital of France is", max_tokens=1, temperature=0
    )
    assert answer.choices[0].text == " Paris"


def test_chat_streams_the_answer_with_masks(client: openai.OpenAI):
    asked: dict[str, Any] = {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": "What is 2 + 3?"}],
        "max_tokens": 16,
        "seed": 7,
        "extra_body": {"top_k": 20},
    }
    whole = client.chat.completions.create(**asked)
    parts = [chunk.choices[0] for chunk in client.chat.completions.create(stream=True, **asked)]
    assert "".join(part.delta.content or "" for part in parts) == whole.choices[0].message.content
    assert whole.choices[0].model_extra is not None
    rows = [row for part in parts for row in (part.model_extra or {})["sampling_mask"]]
    assert rows == whole.choices[0].model_extra["sampling_mask"]
    assert all(len(row) >= 20 for row in rows)


def test_renderers_client_reads_tokens_logprobs_and_masks(real: Serving):
    tokenizer = real.engine.tokenizer
    renderer = renderers.create_renderer(tokenizer, renderers.DefaultRendererConfig())

    async def main() -> dict[str, Any]:
        async with openai.AsyncOpenAI(base_url=f"{real.url}/v1", api_key=KEY, max_retries=0) as client:
            return await renderers.client.generate(
                client=client,
                renderer=renderer,
                messages=[{"role": "user", "content": "What is 2 + 3?"}],
                model="smollm2-135m",
                sampling_params={"max_tokens": 12, "top_p": 0.9, "top_k": 50, "temperature": 1.0, "seed": 3},
                cache_salt="salt",
                priority=0,
            )

    answer = asyncio.run(main())
    assert answer["prompt_ids"] == renderer.render_ids(
        [{"role": "user", "content": "What is 2 + 3?"}], add_generation_prompt=True
    )
    assert len(answer["completion_ids"]) == len(answer["completion_logprobs"]) == len(answer["sampling_mask"])
    assert all(token in row for token, row in zip(answer["completion_ids"], answer["sampling_mask"], strict=True))
    assert all(len(row) <= 60 for row in answer["sampling_mask"])
    assert answer["usage"]["completion_tokens"] == len(answer["completion_ids"])
    assert answer["finish_reason"] in ("stop", "length")


def test_renderers_client_stops_an_overlong_prompt_before_it_is_sent(real: Serving):
    renderer = renderers.create_renderer(real.engine.tokenizer, renderers.DefaultRendererConfig())

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{real.url}/v1", api_key=KEY, max_retries=0) as client:
            await renderers.client.generate(
                client=client, renderer=renderer, messages=[], model="smollm2-135m", prompt_ids=[5] * 600
            )

    with pytest.raises(renderers.OverlongPromptError, match="600"):
        asyncio.run(main())


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_lines_of_the_document_are_answered(real: Serving, tmp_path: Path):
    blocks = re.findall(r"```bash\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert len(blocks) >= 10
    answers = []
    for command in re.split(r"\n(?=curl )", "\n".join(block.strip() for block in blocks)):
        script = command.replace("http://127.0.0.1:8000", real.url).replace("curl -s", "curl --fail-with-body -s", 1)
        done = subprocess.run(
            ["bash", "-c", script],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tmp_path,
            env={"KEEPMASK_API_KEY": KEY, "PATH": "/usr/bin:/bin"},
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        answers.append(done.stdout)
    health, generated, streamed, arrow, *_ = answers
    assert json.loads(health) == {}
    (choice,) = json.loads(generated)["choices"]
    assert len(choice["token_ids"]) == len(mask_from_fields(choice)) == 4
    assert sum(len(event["choices"][0]["token_ids"]) for event in events(streamed)) == 4
    assert arrow == ""
    assert json.loads(answers[-1])["weight_version"] == "1"
    (code,) = [
        block for block in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL) if "pyarrow" in block
    ]
    found: dict[str, Any] = {}
    exec(code.replace("rollouts.arrows", str(tmp_path / "rollouts.arrows")), found)
    assert [rollout.token_ids.size for rollout in found["rollouts"]] == [4, 4]


def test_python_lines_of_the_document_run(real: Serving):
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "Client(" in block]
    exec(code.replace("http://127.0.0.1:8000", real.url).replace('"KEY"', f'"{KEY}"'), {})
