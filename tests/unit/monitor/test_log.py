"""The log: whole lines at once, and one line said where it cannot be written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memprof.device.gpus import GpuProcess, NvmlGpu
from memprof.monitor.log import Log
from memprof.monitor.sample import Allocator, MonitorSample, Peaks, WatchedProcess, csv_header, csv_row


def test_lines_are_there_at_once(tmp_path):
    file = tmp_path / "log.csv"
    log = Log(file, ["a", "b"])
    log.write([1, ""])
    assert file.read_text() == "a,b\n1,\n"
    log.write([2, 'of "x", and\ny'])
    assert file.read_text() == 'a,b\n1,\n2,"of ""x"", and\ny"\n'
    log.close()
    assert log.note == ""


def test_a_folder_that_is_not_there(tmp_path):
    log = Log(tmp_path / "no" / "log.csv", ["a"])
    log.write([1])
    log.close()
    assert log.note == f"log {tmp_path / 'no' / 'log.csv'}: no such file or directory"


def test_no_log():
    log = Log(None, ["a"])
    log.write([1])
    assert log.note == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_device():
    log = Log(Path("/dev/full"), ["a"])
    log.write([1])
    assert log.note == "log /dev/full: no space left on device; 1 line is missing"
    log.write([2])
    assert log.note == "log /dev/full: no space left on device; 2 lines are missing"


def test_a_disk_that_is_full_for_a_while(tmp_path, monkeypatch):
    """Half a line that found room is taken back, and the log goes on when there is room again."""
    file = tmp_path / "log.csv"
    log = Log(file, ["time", "bytes"])
    log.write([1, 100])
    real, room = os.write, 3

    def write(descriptor, data):
        nonlocal room
        if not room:
            raise OSError(28, "No space left on device")
        written = real(descriptor, data[:room])
        room -= written
        return written

    monkeypatch.setattr(os, "write", write)
    log.write([2, 200])
    assert file.read_text() == "time,bytes\n1,100\n"
    room = 1000
    log.write([3, 300])
    assert file.read_text() == "time,bytes\n1,100\n3,300\n"
    assert "1 line is missing" in log.note


def _sample() -> MonitorSample:
    def allocator(device, allocated):
        return Allocator(device, "gpu", "", 0, None, allocated, 2 * allocated, 3 * allocated, 4 * allocated, 5, 6, 1, 0)

    return MonitorSample(
        time=1_700_000_000.25,
        elapsed=2.5,
        gpus=(
            NvmlGpu(1, "a", total_bytes=100, used_bytes=90, processes=(GpuProcess(7, "x", 30, "compute"),)),
            NvmlGpu(2, "b", notes=("lost",)),
        ),
        processes=(
            WatchedProcess(7, "python", 1000, 1500, 0, (allocator(0, 10), allocator(1, 20))),
            WatchedProcess(8, "python", 2000, 2000, 1, (allocator(0, 30),)),
            WatchedProcess(9, "sh", 10, 10),
        ),
    )


def test_columns():
    sample, peaks = _sample(), Peaks(allocated_bytes=500)
    peaks.add(sample)
    row = dict(zip(csv_header([1, 2]), csv_row(sample, peaks, [1, 2]), strict=True))
    assert row["time"] == "2023-11-14T22:13:20.250+00:00"
    assert (row["processes"], row["cuda_processes"], row["resident_bytes"]) == (3, 2, 3010)
    assert (row["allocated_bytes"], row["reserved_bytes"]) == (60, 120)
    assert (row["interval_peak_allocated_bytes"], row["interval_peak_reserved_bytes"]) == (180, 240)
    assert (row["peak_allocated_bytes"], row["peak_reserved_bytes"], row["alloc_retries"]) == (500, 240, 3)
    assert (row["gpu1_used_bytes"], row["gpu1_total_bytes"], row["gpu1_command_bytes"]) == (90, 100, 30)
    assert (row["gpu2_used_bytes"], row["gpu2_power_watts"]) == ("", "")


def test_what_is_not_known_is_empty_and_not_zero():
    sample, peaks = MonitorSample(0.0, 0.0), Peaks()
    peaks.add(sample)
    row = dict(zip(csv_header([0]), csv_row(sample, peaks, [0]), strict=True))
    assert {row[name] for name in ("allocated_bytes", "peak_allocated_bytes", "gpu0_used_bytes", "ooms")} == {""}
