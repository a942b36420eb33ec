"""The command line as a person meets it."""

import os
import subprocess
import sys

import pytest

from keepmask.cli import main


def run_cli(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "keepmask", *arguments], capture_output=True, text=True, timeout=120, **options
    )


def test_help_names_every_command_and_loads_no_torch():
    code = (
        "import sys; from keepmask.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'transformers', 'pyarrow'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for command in ("demo", "rollout", "report"):
        assert command in done.stdout


@pytest.mark.parametrize("command", ["demo", "rollout", "report"])
def test_each_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert "usage: keepmask" in capsys.readouterr().out


def test_an_unknown_command_is_wrong_usage():
    done = run_cli("frobnicate")
    assert done.returncode == 2
    assert "frobnicate" in done.stderr


def test_a_missing_file_is_one_clear_line():
    done = run_cli("report", "nowhere.parquet")
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["keepmask: nowhere.parquet: No such file or directory"]


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_one_clear_line(tmp_path):
    tmp_path.chmod(0o500)
    done = run_cli("demo", "-o", str(tmp_path / "out"))
    assert done.returncode == 1
    assert "Permission denied" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_output_folder_that_is_a_file_is_one_clear_line(tmp_path):
    (tmp_path / "out").write_text("")
    done = run_cli("demo", "-o", str(tmp_path / "out"))
    assert done.returncode == 1
    assert done.stderr.strip() == f"keepmask: {tmp_path / 'out'}: File exists"


def test_bad_sampling_flags_name_the_rule(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"Hello"\n')
    done = run_cli("rollout", str(prompts), "-o", str(tmp_path / "out.parquet"), "--top-p", "1.5")
    assert done.returncode == 1
    assert "top_p=1.5: must be a number in (0, 1]" in done.stderr
    assert not (tmp_path / "out.parquet").exists()
