"""Processes as /proc shows them: real ones, started here."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

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


def test_names(tmp_path):
    script = tmp_path / "train me.py"
    script.write_text("print('up', flush=True); import time; time.sleep(60)")
    for arguments, name in (
        ([str(script), "--lr", "3"], "train me.py"),
        (["-X", "utf8", "-u", str(script)], "train me.py"),
        (["-c", "print('up', flush=True); import time; time.sleep(60)"], "-c"),
    ):
        process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE)
        try:
            assert process.stdout.readline() == b"up\n"
            assert process_name(process.pid) == f"{os.path.basename(sys.executable)} {name}"
        finally:
            process.kill()
            process.communicate()
    assert process_name(process.pid) is None


def test_a_name_cannot_spoil_the_terminal():
    code = "import os; print('up', flush=True); os.execv('/bin/sleep', ['evil\\033[2J', '60'])"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"up\n"
        for _ in range(500):
            if "evil" in (process_name(process.pid) or ""):
                break
            time.sleep(0.01)
        assert process_name(process.pid) == "evil?[2J"
    finally:
        process.kill()
        process.communicate()
