"""`keepmask conform` as a person meets it, and its guide."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from serving import Serving

from keepmask.cli import main
from keepmask.conform.probes import PROBES, PROFILES
from oracle_server import EOS, OracleServer

GUIDE = (Path(__file__).parents[2] / "docs" / "conform.md").read_text()
SGLANG_NOT_VLLM = [probe.name for probe in PROBES if probe.expected("sglang") != probe.vllm]


def conform(capsys, *arguments):
    """Exit code and standard output."""
    code = main(["conform", *arguments])
    return code, capsys.readouterr().out


def refused(*arguments):
    with pytest.raises(SystemExit) as end:
        main(["conform", *arguments])
    return str(end.value.code)


def test_the_sampler_in_this_process_is_what_its_profile_says(capsys):
    for profile in ("vllm", "vllm-torch", "sglang", "sglang-torch", "hf"):
        code, text = conform(capsys, "--semantics", profile, "--expect", profile)
        assert code == 0
        assert f"Expected {profile}: yes." in text
    assert conform(capsys)[0] == 0
    code, text = conform(capsys, "--semantics", "sglang", "--expect", "vllm")
    assert code == 1
    assert "NO, differs in " + ", ".join(SGLANG_NOT_VLLM) + "." in " ".join(text.split())


@pytest.mark.parametrize("profile", PROFILES)
def test_our_own_server_follows_its_profile_and_fails_any_other_with_the_rows_named(capsys, tiny_with_text, profile):
    with Serving(tiny_with_text, engine={"sampling_semantics": profile}) as server:
        code, text = conform(capsys, server.url, "--expect", "vllm", "--eos-token-id", str(EOS), "--json")
    document = json.loads(text)
    assert document["asked"] == len(PROBES)
    for other in PROFILES:
        told_apart = [probe.name for probe in PROBES if not probe.allows(other, probe.expected(profile))]
        assert document["differing"][other] == told_apart
    assert document["passed"] is (profile == "vllm")
    assert code == (0 if profile == "vllm" else 1)


def test_the_page_of_a_server_names_it_its_rows_and_what_could_not_be_asked(capsys, monkeypatch):
    monkeypatch.setenv("KEEPMASK_API_KEY", "secret")
    with OracleServer(semantics="sglang", tokenizer=True) as server:
        code, text = conform(capsys, server.url, "--expect", "vllm")
        assert {headers["authorization"] for headers in server.headers} == {"Bearer secret"}
    assert code == 1
    assert text.startswith(server.url)
    flat = " ".join(text.split())
    assert "NO, differs in " + ", ".join(SGLANG_NOT_VLLM) + "." in flat
    assert "Untestable: min_tokens_eos: give the model's end token with --eos-token-id." in flat


def test_json_is_one_object(capsys):
    with OracleServer(semantics="sglang") as server:
        code, text = conform(capsys, server.url, "--api", "sglang", "--expect", "vllm", "--json")
    assert code == 1
    assert text.count("\n") == 1
    document = json.loads(text)
    assert document["target"] == f"{server.url}, oracle 1.2"
    assert document["passed"] is False
    assert document["differing"]["vllm"] == SGLANG_NOT_VLLM
    assert [probe["name"] for probe in document["probes"]] == [probe.name for probe in PROBES]


def test_a_server_with_a_key_says_how_to_give_it(tiny_with_text):
    with Serving(tiny_with_text, api_keys=("secret",)) as server:
        assert "401" in refused(server.url)
        assert "give the server's key with --api-key" in refused(server.url, "--api-key", "wrong")


def test_key_and_prompt_reach_the_server(capsys, monkeypatch):
    monkeypatch.setenv("KEEPMASK_API_KEY", "other")
    prompts = []
    with OracleServer(broken=lambda path, body: prompts.append(body.get("token_ids"))) as server:
        flags = ["--prompt-token-ids", "9", "8", "--api-key", "secret"]
        assert conform(capsys, server.url, *flags, "--expect", "vllm")[0] == 0
        assert {headers["authorization"] for headers in server.headers} == {"Bearer secret"}
    assert all(prompt is None or prompt[:2] == [9, 8] for prompt in prompts)


def test_only_asks_what_it_is_told_to_in_the_order_of_the_page(capsys):
    code, text = conform(capsys, "--only", "greedy", "top_p", "--semantics", "sglang", "--expect", "vllm", "--json")
    assert code == 0
    assert [probe["name"] for probe in json.loads(text)["probes"]] == ["top_p", "greedy"]
    _, text = conform(capsys, "--only", "greedy")
    assert "temperature" in text
    assert "penalties" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "top_k", "topp"], "--only topp: no such probe; there are top_k, top_k_tie,"),
        (["--api", "sglang"], "--api: belongs to a server; give its URL"),
        (["--eos-token-id", "2"], "--eos-token-id: belongs to a server"),
        (
            ["http://127.0.0.1:1", "--semantics", "hf"],
            "--semantics: chooses the profile of the sampler in this process",
        ),
        (["http://127.0.0.1:1"], "http://127.0.0.1:1: not reachable"),
        (["http://127.0.0.1:1", "--timeout", "0"], "--timeout=0.0: must be more than 0 seconds"),
        (["127.0.0.1:8000"], "is no address of a server"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(arguments, message):
    assert message in refused(*arguments)


def test_servers_are_asked_without_torch():
    with OracleServer() as server:
        code = (
            "import sys; from keepmask.cli import main\n"
            f"assert main(['conform', {server.url!r}, '--expect', 'vllm']) == 0\n"
            "assert not {'torch', 'transformers', 'pyarrow', 'numba'} & set(sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_the_page_in_the_guide_is_what_the_command_prints(capsys):
    (command, page) = re.search(r"```console\n\$ keepmask conform (--semantics[^\n]*)\n(.*?)```", GUIDE, re.S).groups()
    _, text = conform(capsys, *command.split())
    assert page == "".join(f"{line.rstrip()}\n" for line in text.splitlines())


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_the_guide_explains_every_probe_as_it_is_asked(probe):
    (row,) = re.findall(rf"^\| `{probe.name}` \|(.*)\|(.*)\|(.*)\|$", GUIDE, re.M)
    wanted, sampling, meaning = (cell.strip() for cell in row)
    assert wanted == in_words(probe.wanted)
    assert sampling == ", ".join(conditions(probe))
    assert meaning


def in_words(probabilities):
    """ ".4 3 x .2" for (.4, .2, .2, .2)."""
    texts = [f"{p:.2g}".removeprefix("0") for p in probabilities]
    runs = {text: texts.count(text) for text in texts}
    return " ".join(f"{n} x {text}" if n > 2 else " ".join([text] * n) for text, n in runs.items())


def conditions(probe):
    for name, value in probe.params.items():
        if name == "logit_bias":
            yield name + "".join(f" {slot}: {bias:+g}" for slot, bias in value.items())
        elif name == "bad_words":
            yield name + "".join(f" {' '.join(map(str, word))}" for word in value)
        else:
            yield f"{name} {' '.join(map(str, value)) if isinstance(value, tuple) else f'{value:g}'}"
    if probe.prompt:
        yield f"prompt ends with {' '.join(map(str, probe.prompt))}"
    if probe.output:
        yield f"output so far {' '.join(map(str, probe.output))}"
    if probe.eos is not None:
        yield f"{probe.eos} is the end token"
    if probe.num_completions > 1:
        yield f"n {probe.num_completions}"
    if probe.exact:
        yield "*exact*"
