"""litellm, as hosted_vllm: chat whole and streamed, completions, fields of vLLM beside OpenAI's."""

import sys

import litellm


def main(url: str, model: str) -> None:
    asked = {"model": "hosted_vllm/served", "api_base": f"{url}/v1", "api_key": "any", "max_tokens": 8, "seed": 5}
    messages = [{"role": "user", "content": "What is 2 + 3?"}]
    whole = litellm.completion(messages=messages, logprobs=True, top_logprobs=2, top_k=20, **asked)
    (choice,) = whole.choices
    assert choice.message.content
    assert len(choice.logprobs.content) == whole.usage.completion_tokens <= 8
    parts = litellm.completion(messages=messages, stream=True, top_k=20, **asked)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == choice.message.content
    text = litellm.text_completion(prompt="The capital of France is", temperature=0, **asked)
    assert "Paris" in text.choices[0].text


main(*sys.argv[1:])
