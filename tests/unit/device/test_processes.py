"""Processes as /proc shows them: real ones, started here."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from memprof.device import processes
from memprof.device.processes import ProcessTree, process_name

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs Linux's /proc")
MIB = 1 << 20

NESTED = """
import subprocess, sys, time
inner = "import time; x = bytearray(64 << 20); print('up', flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", inner])
time.sleep(60)
"""

ORPHAN = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"])
sys.stdin.readline()
"""


def _start(code):
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, start_new_session=True
    )


def _end(process):
    os.killpg(process.pid, 9)
    process.communicate()


def test_descendants_and_their_memory():
    process = _start(NESTED)
    try:
        assert process.stdout.readline() == "up\n"
        tree = ProcessTree(process.pid)
        outer, inner = sorted(tree.read(), key=lambda found: found.pid != process.pid)
        assert outer.pid == process.pid
        assert outer.resident_bytes < 64 * MIB <= inner.resident_bytes < 128 * MIB
        assert inner.peak_resident_bytes >= inner.resident_bytes
    finally:
        _end(process)
    assert ProcessTree(process.pid).read() == ()


def test_an_orphan_stays_in_the_tree():
    process = _start(ORPHAN)
    try:
        assert process.stdout.readline() == "up\n"
        tree = ProcessTree(process.pid)
        (orphan,) = [found for found in tree.read() if found.pid != process.pid]
        process.stdin.write("\n")
        process.stdin.flush()
        process.wait(10)
        time.sleep(0.05)
        assert [found.pid for found in tree.read()] == [orphan.pid]
    finally:
        _end(process)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["/usr/bin/python3", "/home/me/train me.py", "--lr", "3"], "python3 train me.py"),
        (["python3", "-X", "utf8", "-u", "a.py"], "python3 a.py"),
        (["python3", "-W", "error", "-m", "torch.distributed.run", "a.py"], "python3 -m torch.distributed.run"),
        (["pypy3", "-c", "print()"], "pypy3 -c"),
        (["python3", "-u"], "python3"),
        (["/usr/lib/xorg/Xorg", ":0"], "Xorg"),
        (["evil\x1b[2J"], "evil?[2J"),
        (["x" * 60], "x" * 60),
        (["x" * 61], "x" * 59 + "…"),
        ([], "kworker/0:1"),  # a kernel thread
    ],
)
def test_names(tmp_path, monkeypatch, arguments, name):
    monkeypatch.setattr(processes, "PROC", tmp_path)
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cmdline").write_bytes(b"".join(one.encode() + b"\0" for one in arguments))
    (tmp_path / "7" / "comm").write_text("kworker/0:1\n")
    assert process_name(7) == name
    assert process_name(8) is None


def test_a_name_that_is_no_text(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "PROC", tmp_path)
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cmdline").write_bytes(b"caf\xe9")
    assert process_name(7) == "caf\N{REPLACEMENT CHARACTER}"
    (tmp_path / "7" / "cmdline").write_bytes(b"")
    (tmp_path / "7" / "comm").write_bytes(b"\n")
    assert process_name(7) is None
