"""lm-eval's local-completions: log-likelihoods by echo, and generation until a string."""

import sys

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI


def main(url: str, model: str) -> None:
    api = LocalCompletionsAPI(
        base_url=f"{url}/v1/completions",
        model="served",
        tokenizer=model,
        tokenizer_backend="huggingface",
        max_length=512,
    )

    def ask(kind: str, *arguments: tuple) -> list:
        return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]

    paris, london = api.loglikelihood(
        ask("loglikelihood", ("The capital of France is", " Paris"), ("The capital of France is", " London")),
        disable_tqdm=True,
    )
    assert paris[0] > london[0], (paris, london)
    assert paris[1], "the likeliest continuation was not seen as greedy"
    (text,) = api.generate_until(
        ask("generate_until", ("The capital of France is", {"until": ["."], "max_gen_toks": 8, "temperature": 0})),
        disable_tqdm=True,
    )
    assert "Paris" in text, text


main(*sys.argv[1:])
