import shutil

from keepmask.models.digest import digests


def test_a_digest_is_of_what_is_in_the_files_whatever_the_folder_is_called(tiny_with_text, tmp_path):
    there = tmp_path / "elsewhere"
    shutil.copytree(tiny_with_text, there)
    before = digests(str(tiny_with_text))
    assert digests(str(there)) == before
    assert {len(value) for value in before.values()} == {32}
    (there / "README.md").write_text("notes")
    assert digests(str(there)) == before


def test_weights_and_tokenizer_are_told_apart(tiny_with_text, tmp_path):
    there = tmp_path / "model"
    shutil.copytree(tiny_with_text, there)
    before = digests(str(there))
    (there / "tokenizer.json").write_bytes((there / "tokenizer.json").read_bytes() + b"\n")
    tokenizer = digests(str(there))
    assert (tokenizer["checkpoint"] == before["checkpoint"], tokenizer["tokenizer"] == before["tokenizer"]) == (
        True,
        False,
    )
    (weights,) = there.glob("*.safetensors")
    weights.rename(there / "renamed.safetensors")
    assert digests(str(there))["checkpoint"] != before["checkpoint"]
