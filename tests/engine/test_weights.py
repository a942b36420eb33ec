"""New weights: checked before anything is touched, swapped all or none, and never mixed with what the old ones left."""

from __future__ import annotations

import contextlib
import hashlib
import random
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import tiny
from keepmask import LLM, RequestError, SamplingParams
from keepmask.engine.weights import WeightStage, checksum, read_safetensors

PROMPT = list(range(100, 148))
PARAMS = SamplingParams(max_tokens=12, top_k=8, seed=7, ignore_eos=True, return_sampling_mask=True, logprobs=0)
OPTIONS = {
    "dtype": "float32",
    "device": "cpu",
    "kv_cache_memory_bytes": 2**22,
    "skip_tokenizer_init": True,
    "logprobs_mode": "processed_logprobs",
}


def checkpoint(folder: Path, seed: int, **changes) -> Path:
    return tiny.save(folder / f"seed{seed}", "llama", seed=seed, **changes)


@pytest.fixture
def old(tmp_path) -> LLM:
    return LLM(str(checkpoint(tmp_path, 0)), **OPTIONS)


@pytest.fixture
def new(tmp_path) -> LLM:
    return LLM(str(checkpoint(tmp_path, 1)), **OPTIONS)


def state(llm: LLM) -> dict[str, torch.Tensor]:
    return llm.engine.weights()


def drawn(llm: LLM, prompt=PROMPT):
    (output,) = llm.generate({"prompt_token_ids": prompt}, PARAMS, use_tqdm=False)
    (completion,) = output.outputs
    return completion.token_ids, completion.sampling_mask


def scores(llm: LLM) -> list[dict]:
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, PARAMS, use_tqdm=False)
    return list(output.outputs[0].logprobs)


def test_updated_engine_is_the_one_loaded_from_the_new_checkpoint(old, new, tmp_path):
    before = drawn(old)
    assert old.update_weights(tmp_path / "seed1") == "1"
    assert old.engine.weight_checksums() == new.engine.weight_checksums()
    assert drawn(old) == drawn(new) != before
    assert old.update_weights(state(LLM(str(checkpoint(tmp_path, 0)), **OPTIONS)), version="back") == "back"
    assert drawn(old) == before


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_every_tensor_of_an_update_counts(tmp_path, architecture):
    folder = tiny.save(tmp_path / "model", architecture)
    llm, generator = LLM(str(folder), **OPTIONS), torch.Generator().manual_seed(5)
    noisy = {
        name: value + 0.2 * torch.randn(value.shape, generator=generator)
        for name, value in llm.engine.weights().items()
    }
    llm.update_weights(noisy)
    safetensors.torch.save_file(noisy, folder / "model.safetensors", metadata={"format": "pt"})
    want = LLM(str(folder), **OPTIONS)
    assert llm.engine.weight_checksums() == want.engine.weight_checksums()
    assert scores(llm) == scores(want)
    assert drawn(llm) == drawn(want)


def test_callers_tensors_are_copied(old, new):
    given = state(new)
    kept = {name: value.clone() for name, value in given.items()}
    old.update_weights(given)
    old.update_weights(state(new), version="x")
    assert all(torch.equal(given[name], kept[name]) for name in given)
    given["model.norm.weight"] += 1
    assert old.engine.weight_checksums() == new.engine.weight_checksums()


@pytest.mark.parametrize("names", [("model.embed_tokens.weight",), ("lm_head.weight",), None])
def test_tied_weights_may_come_by_one_name_or_both(tmp_path, names):
    old = LLM(str(checkpoint(tmp_path, 0, tie_word_embeddings=True)), **OPTIONS)
    new = LLM(str(checkpoint(tmp_path, 1, tie_word_embeddings=True)), **OPTIONS)
    given = state(new)
    tied = {"model.embed_tokens.weight", "lm_head.weight"}
    if names is not None:
        given = {name: value for name, value in given.items() if name not in tied or name in names}
    old.update_weights(given)
    assert drawn(old) == drawn(new)
    assert old.engine.weight_checksums()["lm_head.weight"] == new.engine.weight_checksums()["lm_head.weight"]


def test_tied_weights_with_two_values_are_refused(tmp_path):
    llm = LLM(str(checkpoint(tmp_path, 0, tie_word_embeddings=True)), **OPTIONS)
    given = state(llm)
    given["lm_head.weight"] += 1
    with pytest.raises(RequestError, match="is tied to"):
        llm.update_weights(given)


def wrong_updates(right):
    norm = "model.norm.weight"
    missing = dict(right)
    del missing[norm], missing["lm_head.weight"]
    return {
        "unknown": right | {"model.norm.wieght": right[norm]},
        "missing": missing,
        "shape": right | {norm: right[norm][:-1]},
        "transposed": right | {"lm_head.weight": right["lm_head.weight"].T},
        "type": right | {norm: right[norm].bfloat16()},
        "integers": right | {norm: right[norm].long()},
        "nan": right | {norm: torch.full_like(right[norm], float("nan"))},
        "infinite": right | {norm: torch.full_like(right[norm], float("inf"))},
        "empty": {},
    }


@pytest.mark.parametrize(
    "case", ["unknown", "missing", "shape", "transposed", "type", "integers", "nan", "infinite", "empty"]
)
def test_update_that_does_not_fit_changes_nothing(old, new, case):
    before, checks = drawn(old), old.engine.weight_checksums()
    with pytest.raises(RequestError) as raised:
        old.update_weights(wrong_updates(state(new))[case])
    assert raised.value.param == "weights"
    assert "the model keeps its own" in str(raised.value)
    assert old.engine.weight_version == "default"
    assert old.engine.weight_checksums() == checks
    assert drawn(old) == before


def test_all_offending_tensors_are_named(old, new):
    given = state(new)
    given["model.norm.weight"] = given["model.norm.weight"][:-1]
    given["lm_head.weight"] = given["lm_head.weight"].half()
    given["other"] = given["model.norm.weight"]
    with pytest.raises(RequestError) as raised:
        old.update_weights(given)
    for part in ("3 of 22", "model.norm.weight: shape [63] instead of [64]", "lm_head.weight: float16", "other: the"):
        assert part in str(raised.value)


def test_partial_update_leaves_the_rest(old, new):
    checks, theirs = old.engine.weight_checksums(), new.engine.weight_checksums()
    old.update_weights({"lm_head.weight": state(new)["lm_head.weight"]}, partial=True)
    assert old.engine.weight_checksums() == checks | {"lm_head.weight": theirs["lm_head.weight"]}
    with pytest.raises(RequestError, match="missing"):
        old.update_weights({}, partial=True)


def test_cast_rounds_to_the_models_type(tmp_path, new):
    llm = LLM(str(checkpoint(tmp_path, 0)), **OPTIONS | {"dtype": "bfloat16"})
    with pytest.raises(RequestError, match="float32 instead of bfloat16"):
        llm.update_weights(state(new))
    llm.update_weights(state(new), cast=True)
    expected = {name: checksum(value.bfloat16()) for name, value in state(new).items()}
    assert llm.engine.weight_checksums() == expected
    with pytest.raises(RequestError, match="int64 cannot become bfloat16"):
        llm.update_weights({name: value.long() for name, value in state(new).items()}, cast=True)


def test_parts_are_collected_and_each_weight_comes_once(old, new):
    given = sorted(state(new).items())
    stage = old.engine.stage_weights()
    stage.add(dict(given[:5]))
    assert len(stage.missing) == len(given) - 5
    with pytest.raises(RequestError, match="missing"):
        old.engine.update_weights(stage)
    with pytest.raises(RequestError, match="was given already"):
        stage.add(dict(given[4:7]))
    stage.add(dict(given[5:]))
    assert stage.missing == []
    old.engine.update_weights(stage)
    assert old.engine.weight_checksums() == new.engine.weight_checksums()


def test_checksum_is_sha256_of_type_shape_and_bytes():
    value = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    by_hand = hashlib.sha256(b"float32[2, 3]" + np.arange(6, dtype="<f4").tobytes()).hexdigest()
    assert checksum(value) == checksum(value.T.contiguous().T) == by_hand
    assert checksum(value.reshape(3, 2)) != by_hand
    assert checksum(value.double()) != by_hand
    assert checksum(torch.tensor(1.0)) == hashlib.sha256(b"float32[]" + np.float32(1).tobytes()).hexdigest()


def test_staged_values_can_be_held_against_checksums(old, new):
    stage = old.engine.stage_weights()
    stage.add(state(new))
    stage.check_checksums(new.engine.weight_checksums())
    with pytest.raises(RequestError, match="2 tensors have another checksum"):
        stage.check_checksums({"model.norm.weight": "00", "elsewhere": "00"})


@pytest.mark.parametrize("at", [0, 1, 10, 20])
def test_swap_that_breaks_in_the_middle_is_undone(old, new, monkeypatch, at):
    before, checks = drawn(old), old.engine.weight_checksums()
    stage = old.engine.stage_weights()
    stage.add(state(new))
    swap, calls = WeightStage._swap, 0

    def breaking(self, name, target):
        nonlocal calls
        calls += 1
        if calls == at + 1:
            raise MemoryError("none left")
        swap(self, name, target)

    with monkeypatch.context() as patch:
        patch.setattr(WeightStage, "_swap", breaking)
        with pytest.raises(MemoryError):
            old.engine.update_weights(stage)
    assert old.engine.weight_checksums() == checks
    assert old.engine.weight_version == "default"
    assert drawn(old) == before
    old.engine.update_weights(stage)  # the stage still holds the new ones
    assert drawn(old) == drawn(new)


def test_spans_split_at_the_token_where_the_weights_changed(old, new):
    stream = old.stream({"prompt_token_ids": PROMPT}, PARAMS)
    for _ in range(5):
        output = next(stream)
    old.update_weights(state(new), version="new")
    *_, output = stream
    (completion,) = output.outputs
    assert [tuple(span) for span in completion.weight_versions] == [(0, 5, "default"), (5, 12, "new")]
    assert completion.sampling_mask is not None
    assert len(completion.token_ids) == len(completion.sampling_mask) == 12


def test_cached_prefixes_of_the_old_weights_are_not_found(old, new):
    def cached():
        (output,) = old.generate({"prompt_token_ids": PROMPT}, PARAMS, use_tqdm=False)
        return output.num_cached_tokens

    assert (cached(), cached()) == (0, 32)
    old.update_weights(state(new))
    assert (cached(), cached()) == (0, 32)
    assert drawn(old) == drawn(new)


def test_request_that_ran_across_the_change_leaves_no_prefix_behind(old, new):
    # Long enough to be computed in chunks: the first with the old weights, the rest with the new.
    old_chunked = LLM(old.config.model, **OPTIONS, max_num_batched_tokens=20)
    engine = old_chunked.engine
    running = engine.add("running", PROMPT, PARAMS)
    engine.step()
    waiting = engine.add("waiting", PROMPT, PARAMS)  # queued before the change, computed after it
    old_chunked.update_weights(state(new))
    while not (running.finished and waiting.finished):
        engine.step()
    assert waiting.num_cached_tokens == 0
    (completion,) = engine.output(waiting).outputs
    assert (completion.token_ids, completion.sampling_mask) == drawn(new)
    assert drawn(old_chunked) == drawn(new)


def test_noise_replaces_every_weight_and_has_a_version_of_its_own(old):
    checks = old.engine.weight_checksums()
    assert old.engine.randomize_weights(torch.Generator().manual_seed(1)) == "default+random"
    noise = old.engine.weight_checksums()
    assert all(noise[name] != checks[name] for name in checks)
    drawn(old)


def test_versions_go_on_from_the_old_one(old, new):
    assert old.update_weights(state(new)) == "1"
    assert old.update_weights(state(new)) == "2"
    assert old.update_weights(state(new), version="step-7") == "step-7"
    assert old.update_weights(state(new)) == "step-7+1"


def test_bytes_that_are_no_safetensors_file_are_refused(old):
    good = safetensors.torch.save(state(old))
    assert set(read_safetensors(good)) == set(state(old))
    chance = random.Random(0)
    for attempt in range(200):
        damaged = bytearray(good)
        if attempt % 2:
            del damaged[chance.randrange(len(damaged)) :]
        else:
            for _ in range(4):  # the header, where structure is
                damaged[chance.randrange(2000)] = chance.randrange(256)
        with contextlib.suppress(RequestError):  # any other exception fails the test
            old.engine.stage_weights(partial=True).add(read_safetensors(bytes(damaged)))


@pytest.mark.parametrize("path", ["nothing", "file.bin", "empty"])
def test_paths_without_weights_are_refused(old, tmp_path, path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.bin").write_bytes(b"\x80\x04.")  # a pickle is data like any other
    with pytest.raises(RequestError):
        old.update_weights(tmp_path / path)
