import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from keepmask.errors import ConfigError, MaskError
from keepmask.wire.parquet import write_table
from keepmask.wire.rollout_file import RolloutWriter, read_rollouts, write_rollouts
from keepmask.wire.rollouts import to_table
from made_rollouts import METADATA, made_rollout, made_rollouts, token_text


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rollouts.parquet"


def group(request_id, n=2):
    return [made_rollout(request_id, i) for i in range(n)]


def test_a_file_gives_back_rollouts_and_metadata(path):
    assert write_rollouts(path, made_rollouts(), METADATA, token_text=token_text) == path
    rollouts, metadata = read_rollouts(path)
    assert rollouts == made_rollouts()
    assert {name: metadata[name] for name in METADATA} == METADATA
    assert metadata["keepmask"]
    assert os.listdir(path.parent) == [path.name]


def test_the_file_has_the_text_of_every_id_in_it(path):
    asked = []

    def text(token_ids):
        asked.extend(token_ids)
        return token_text(token_ids)

    with RolloutWriter(path, METADATA, token_text=text) as writer:
        for request_id in ("0", "1"):
            writer.write(group(request_id))
        writer.finish()
    rollouts, metadata = read_rollouts(path)
    occurring = set()
    for rollout in rollouts:
        occurring |= {*rollout.prompt_token_ids.tolist(), *rollout.token_ids.tolist()}
        occurring |= set(rollout.sampling_mask.ids.tolist())
    assert metadata["token_text"] == dict(zip(occurring, token_text(occurring), strict=True))
    assert len(asked) == len(set(asked))


def test_no_rollouts_make_an_empty_file(path):
    write_rollouts(path, [], METADATA)
    assert read_rollouts(path)[0] == []


def test_an_interrupted_run_continues_where_it_stopped(path):
    with RolloutWriter(path, METADATA, token_text=token_text) as writer:
        writer.write(group("1"))
        writer.write([*group("10"), *group("9")])
    with RolloutWriter(path, METADATA, token_text=token_text) as writer:
        assert writer.completed() == {"1", "10", "9"}
        writer.write(group("2"))
        writer.finish()
    continued = path.read_bytes()
    write_rollouts(path, [r for i in ("1", "2", "9", "10") for r in group(i)], METADATA, overwrite=True)
    assert read_rollouts(path)[0] == [r for i in ("1", "2", "9", "10") for r in group(i)]
    path.write_bytes(continued)
    assert read_rollouts(path)[0] == [r for i in ("1", "2", "9", "10") for r in group(i)]


def test_a_finished_run_is_continued_with_more_requests(path):
    write_rollouts(path, group("1"), METADATA, token_text=token_text)
    with RolloutWriter(path, METADATA, token_text=token_text) as writer:
        assert writer.completed() == {"1"}
        writer.write(group("0"))
        writer.finish()
    assert read_rollouts(path)[0] == [*group("0"), *group("1")]


def test_a_finished_run_with_nothing_to_add_stays_as_it_is(path):
    write_rollouts(path, group("1"), METADATA)
    before = path.stat().st_mtime_ns
    with RolloutWriter(path, METADATA) as writer:
        writer.finish()
    with RolloutWriter(path, METADATA):
        pass
    assert path.stat().st_mtime_ns == before
    assert os.listdir(path.parent) == [path.name]


def test_parts_of_an_unfinished_run_can_be_read(path):
    with RolloutWriter(path, METADATA, token_text=token_text) as writer:
        writer.write(group("1"))
    with pytest.raises(MaskError, match=r"not finished; run it again to finish it, or read .*\.parts"):
        read_rollouts(path)
    rollouts, metadata = read_rollouts(writer.folder)
    assert rollouts == group("1")
    assert metadata["model"] == "tiny"
    assert metadata["token_text"]


@pytest.mark.parametrize("finished", [True, False])
def test_another_run_is_refused_with_what_differs_and_the_remedy(path, finished):
    with RolloutWriter(path, METADATA) as writer:
        writer.write(group("1"))
        if finished:
            writer.finish()
    before = sorted(str(file) for file in path.parent.rglob("*"))
    with pytest.raises(ConfigError, match=r"another run: model is 'tiny' there, 'big' here; .*--overwrite"):
        RolloutWriter(path, {**METADATA, "model": "big"})
    assert sorted(str(file) for file in path.parent.rglob("*")) == before


@pytest.mark.parametrize("make", [lambda path: path.write_text("notes"), lambda path: path.mkdir()])
def test_something_else_of_that_name_is_refused_and_kept(path, make):
    make(path)
    with pytest.raises(ConfigError, match="exists and is no rollout file; choose another name"):
        RolloutWriter(path, METADATA)
    assert os.listdir(path.parent) == [path.name]


def test_overwriting_keeps_the_old_file_until_the_new_one_is_whole(path):
    write_rollouts(path, group("1"), METADATA)
    other = {**METADATA, "model": "big"}
    with RolloutWriter(path, other, overwrite=True) as writer:
        assert writer.completed() == frozenset()
        writer.write(group("2"))
    assert read_rollouts(path)[0] == group("1")
    with RolloutWriter(path, other) as writer:
        assert writer.completed() == {"2"}
        writer.finish()
    assert read_rollouts(path)[0] == group("2")


def test_overwriting_starts_afresh(path):
    with RolloutWriter(path, METADATA) as writer:
        writer.write(group("1"))
    with RolloutWriter(path, METADATA, overwrite=True) as writer:
        assert writer.completed() == frozenset()
        writer.finish()
    assert read_rollouts(path)[0] == []


def test_a_rollout_written_twice_is_refused(path):
    with RolloutWriter(path, METADATA) as writer:
        writer.write(group("1"))
        for again in (group("1"), [*group("2"), made_rollout("2", 1)]):
            with pytest.raises(MaskError, match="written twice"):
                writer.write(again)
        assert writer.completed() == {"1"}


def test_two_writers_of_one_file_are_refused(path):
    with RolloutWriter(path, METADATA), pytest.raises(ConfigError, match="another process is writing it"):
        RolloutWriter(path, METADATA)


def test_a_damaged_part_is_named_and_the_others_stay(path):
    with RolloutWriter(path, METADATA) as writer:
        writer.write(group("1"))
        writer.write(group("2"))
    damaged = writer.folder / "part-000001.parquet"
    data = bytearray(damaged.read_bytes())
    data[len(data) // 3] ^= 255
    damaged.write_bytes(data)
    with pytest.raises(MaskError, match=r"part-000001\.parquet"):
        RolloutWriter(path, METADATA)
    with pytest.raises(MaskError, match=r"part-000001\.parquet"):
        read_rollouts(writer.folder)
    damaged.unlink()
    with RolloutWriter(path, METADATA) as again:
        assert again.completed() == {"1"}


def test_a_damaged_run_file_is_named(path):
    with RolloutWriter(path, METADATA) as writer:
        writer.write(group("1"))
    (writer.folder / "run.json").write_text("{")
    with pytest.raises(MaskError, match=r"run\.json: damaged; start afresh"):
        RolloutWriter(path, METADATA)


def test_parts_of_another_run_are_never_taken_for_this_one(path):
    with RolloutWriter(path, METADATA) as writer:
        writer.write(group("1"))
    (writer.folder / "run.json").unlink()  # as a crash while overwriting may leave it
    with pytest.raises(ConfigError, match=r"part-000000\.parquet: holds another run"):
        RolloutWriter(path, {**METADATA, "model": "big"})
    with RolloutWriter(path, METADATA) as writer:
        assert writer.completed() == {"1"}
    with RolloutWriter(path, {**METADATA, "model": "big"}, overwrite=True) as writer:
        assert writer.completed() == frozenset()


def test_a_crash_between_merging_and_tidying_loses_and_doubles_nothing(path, tmp_path):
    with RolloutWriter(path, METADATA) as writer:
        writer.write(group("1"))
        shutil.copytree(writer.folder, tmp_path / "copy")
        writer.finish()
    shutil.move(tmp_path / "copy", writer.folder)
    with RolloutWriter(path, METADATA) as writer:
        assert writer.completed() == {"1"}
        writer.write(group("2"))
        writer.finish()
    assert read_rollouts(path)[0] == [*group("1"), *group("2")]


def test_a_killed_writer_loses_nothing_it_had_written(path):
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(path), str(Path(__file__).parents[1])], stdout=subprocess.PIPE, text=True
    )
    written = [child.stdout.readline().strip() for _ in range(3)]
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    with RolloutWriter(path, METADATA) as writer:
        assert set(written) <= writer.completed()
        writer.finish()
    read = read_rollouts(path)[0]
    assert [r for r in read if r.request_id in written] == [r for i in written for r in group(i)]


_CHILD = textwrap.dedent("""
    import sys
    sys.path.insert(0, sys.argv[2])
    from made_rollouts import METADATA, made_rollout
    from keepmask.wire.rollout_file import RolloutWriter
    writer = RolloutWriter(sys.argv[1], METADATA)
    for i in range(10_000):
        writer.write([made_rollout(str(i), j) for j in range(2)])
        print(i, flush=True)
""")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on file sizes")
def test_a_full_disk_is_reported_and_what_was_written_stays(path):
    import resource  # not on Windows

    with RolloutWriter(path, METADATA) as writer:
        writer.write(group("1"))
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        try:
            with pytest.raises(OSError, match=r"cannot write .*; everything written before is kept in .*\.parts"):
                writer.write(group("2"))
            with pytest.raises(OSError, match=r"cannot write .*rollouts\.parquet; everything written before is kept"):
                writer.finish()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert writer.completed() == {"1"}
        assert not path.exists()
        writer.write(group("2"))
        writer.finish()
    assert read_rollouts(path)[0] == [*group("1"), *group("2")]
    assert os.listdir(path.parent) == [path.name]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        RolloutWriter(tmp_path / "file" / "rollouts.parquet", METADATA)


def test_metadata_must_be_json(path):
    with pytest.raises(TypeError, match="JSON serializable"):
        RolloutWriter(path, {"model": object()})
    assert os.listdir(path.parent) == []


def test_a_long_write_makes_several_parts(path, monkeypatch):
    monkeypatch.setattr("keepmask.wire.rollout_file._PART_BYTES", 4000)
    with RolloutWriter(path, METADATA) as writer:
        writer.write(made_rollouts(num_requests=4))
        assert len(list(writer.folder.glob("part-*"))) > 1
        writer.finish()
    assert read_rollouts(path)[0] == made_rollouts(num_requests=4)


def test_a_completion_that_is_there_twice_is_refused(path):
    with path.open("wb") as stream:
        write_table(stream, to_table([made_rollout("1"), made_rollout("2"), made_rollout("1")]), METADATA, {})
    with pytest.raises(MaskError, match=r"rollouts\.parquet: request '1', completion 0: is there twice"):
        read_rollouts(path)


def test_a_writer_killed_while_it_finishes_leaves_nothing_behind(path, tmp_path):
    code = _CHILD.replace("range(10_000)", "range(2)") + textwrap.dedent("""
        import os, signal
        os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # the whole file is written, but has no name yet
        writer.finish()
    """)
    child = subprocess.run([sys.executable, "-c", code, str(path), str(Path(__file__).parents[1])], check=False)
    assert child.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == ["rollouts.parquet.parts"]
    assert any(name.endswith(".tmp") for name in os.listdir(tmp_path / "rollouts.parquet.parts"))
    (tmp_path / ".rollouts.parquet.parts.done").mkdir()  # as a kill while tidying may leave it
    with RolloutWriter(path, METADATA) as writer:
        assert not list(writer.folder.glob(".*.tmp"))
        writer.finish()
    assert os.listdir(tmp_path) == ["rollouts.parquet"]
    assert read_rollouts(path)[0] == [*group("0"), *group("1")]
