import os
import stat

import pytest

from keepmask.wire.atomic_files import write_atomically


def test_the_file_has_the_new_contents_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "out"
    path.write_bytes(b"old")
    with write_atomically(path) as stream:
        stream.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["out"]


def test_an_exception_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "out"
    path.write_bytes(b"old")

    def interrupted():
        with write_atomically(path) as stream:
            stream.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.skipif(os.name == "nt", reason="POSIX permissions")
def test_the_file_has_the_permissions_of_any_new_file(tmp_path):
    (tmp_path / "plain").touch()
    with write_atomically(tmp_path / "out") as stream:
        stream.write(b"new")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "out")]
    assert modes[0] == modes[1]


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    with (
        pytest.raises(FileNotFoundError, match=r"cannot write .*absent/out; your rows are kept"),
        write_atomically(tmp_path / "absent" / "out", kept="your rows are kept"),
    ):
        pass


def test_a_folder_in_the_way_is_named(tmp_path):
    (tmp_path / "out").mkdir()
    with (
        pytest.raises(OSError, match=r"cannot write .*out; nothing there was changed"),
        write_atomically(tmp_path / "out") as stream,
    ):
        stream.write(b"new")
    assert os.listdir(tmp_path) == ["out"]
