"""The memory that reading may take: foretold by size, moved by an option, kept by the system."""

from __future__ import annotations

import errno
import resource
import sys

import pytest

from memprof.device import ceiling as module
from memprof.device.ceiling import MIN_LIMIT_BYTES, compute_limit_bytes, limit_memory
from memprof.errors import UsageError

MIB = 1 << 20
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the system keeps no such limit")


def test_by_size(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "available_bytes", lambda: None)
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    plain.write_bytes(b"\x80\x04")
    packed.write_bytes(b"\x1f\x8b")
    assert (
        compute_limit_bytes()
        == compute_limit_bytes(plain, packed)
        == compute_limit_bytes(tmp_path, tmp_path / "none")
        == 2 << 30
    )
    with plain.open("r+b") as one, packed.open("r+b") as other:  # holes take no room
        one.truncate(1 << 30)
        other.truncate(1 << 24)
    assert compute_limit_bytes(plain) == 12 << 30
    assert compute_limit_bytes(packed, plain) == (400 << 24) + (12 << 30)
    monkeypatch.setattr(module, "available_bytes", lambda: 3 << 30)
    assert compute_limit_bytes(plain) == 3 << 30


def test_what_is_given_holds_inside(tmp_path):
    with limit_memory(5 << 40):
        assert compute_limit_bytes(tmp_path) == 5 << 40
    assert compute_limit_bytes(tmp_path) <= MIN_LIMIT_BYTES


@on_linux
def test_the_system_keeps_it(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with pytest.raises(UsageError) as caught, limit_memory(64 * MIB, [tmp_path / "bomb"]):
        bytearray(128 * MIB)
    assert str(caught.value) == (
        "reading this takes more memory than it may\n"
        f"  value: {tmp_path / 'bomb'} (over 64.00 MiB)\n"
        "  hint:  if you trust it, let it take more: --max-memory 1"
    )
    with limit_memory(64 * MIB):  # beside what this process has
        assert resource.getrlimit(resource.RLIMIT_DATA)[0] > 72 * MIB
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert len(bytearray(128 * MIB)) == 128 * MIB


@on_linux
def test_a_limit_of_the_process_stays():
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (8 << 40, before[1]))
    try:
        with limit_memory(16 << 40):
            assert resource.getrlimit(resource.RLIMIT_DATA)[0] == 8 << 40
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def test_the_system_may_refuse_a_folder_too(tmp_path):
    with pytest.raises(UsageError, match="more memory than it may"), limit_memory(MIN_LIMIT_BYTES, [tmp_path]):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")
    with pytest.raises(FileNotFoundError), limit_memory(MIN_LIMIT_BYTES, [tmp_path]):
        (tmp_path / "none").read_bytes()
