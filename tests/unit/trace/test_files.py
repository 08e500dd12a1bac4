"""Nothing that somebody else wrote is lost, whatever a path points to."""

from __future__ import annotations

import os
import socket
import stat
import threading
from pathlib import Path

import pytest

from memprof.errors import MemprofError, UsageError
from memprof.trace.files import FileKind, check_output_path, write_atomically

NOTE = FileKind("note", "--to", lambda begin, end: begin.startswith(b"note:") and end.endswith(b"."))
OLD, NEW = b"note: old.", b"note: new."


def _write_and_check(path: Path, *, force: bool = False) -> None:
    check_output_path(path, NOTE, force=force)
    write_atomically(path, NEW, NOTE, force=force)


def test_new_empty_and_own_files_are_written(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "own").write_bytes(OLD)
    for name in ("new", "empty", "own", "n" * 255, "[proj] \x1b[31m"):
        _write_and_check(tmp_path / name)
        assert (tmp_path / name).read_bytes() == NEW
    assert not list(tmp_path.glob(".*"))


def test_who_may_read_a_file_stays_so(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(OLD)
    for mode in (0o600, 0o664):
        file.chmod(mode)
        _write_and_check(file)
        assert stat.S_IMODE(file.stat().st_mode) == mode


@pytest.mark.parametrize("content", [b"import torch\n", b"x" * 10_000, b"note: but of another kind", b"\x00" * 5])
def test_the_file_of_another_is_kept(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "train.py"
    file.write_bytes(content)
    for use in (lambda: check_output_path(file, NOTE), lambda: write_atomically(file, NEW, NOTE)):
        with pytest.raises(UsageError, match="no note of memprof") as caught:
            use()
        assert str(file) in str(caught.value)
        assert file.read_bytes() == content
    _write_and_check(file, force=True)
    assert file.read_bytes() == NEW


def test_a_file_that_changed_during_the_work_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "file"
    check_output_path(file, NOTE)
    file.write_bytes(b"what the script wrote")
    with pytest.raises(UsageError):
        write_atomically(file, NEW, NOTE)
    assert file.read_bytes() == b"what the script wrote"


def test_a_read_only_file_is_kept_also_from_root(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(OLD)
    file.chmod(0o444)
    for force in (False, True):
        with pytest.raises(UsageError, match="read-only"):
            _write_and_check(file, force=force)
    assert file.read_bytes() == OLD


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    target, link, new = tmp_path / "folder" / "target", tmp_path / "link", tmp_path / "new"
    target.write_bytes(OLD)
    link.symlink_to(target)
    new.symlink_to("folder/later")
    _write_and_check(link)
    _write_and_check(new)
    assert link.is_symlink()
    assert target.read_bytes() == NEW
    assert new.is_symlink()
    assert (tmp_path / "folder" / "later").read_bytes() == NEW


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check_output_path(pipe, NOTE)
    with pytest.raises(MemprofError, match="could not be saved"):  # nobody reads it: no hang
        write_atomically(pipe, NEW, NOTE)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    while reader.is_alive():
        try:
            write_atomically(pipe, NEW, NOTE)
        except MemprofError:
            continue  # the reader has not come yet
        break
    reader.join(30)
    assert read == [NEW]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_devices_stay_devices() -> None:
    _write_and_check(Path(os.devnull))
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    if Path("/dev/full").exists():
        with pytest.raises(MemprofError, match="could not be saved"):
            write_atomically(Path("/dev/full"), NEW, NOTE)


def test_what_is_no_place_for_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's name may not be long
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("socket")
        with pytest.raises(UsageError, match="no file that can be written to"):
            _write_and_check(Path("socket"), force=True)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    wrong = (
        tmp_path,
        tmp_path / "no" / "file",
        tmp_path / "socket" / "file",
        tmp_path / ("n" * 300),
        Path("a\0b"),
        loop,
    )
    for path in wrong:
        with pytest.raises(UsageError) as caught:
            _write_and_check(path, force=True)
        assert "--to" in str(caught.value) or "name a file in it" in str(caught.value)
