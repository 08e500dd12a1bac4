"""Messages of probes: what they add up to between two samples, and what else may arrive."""

from __future__ import annotations

import json
import os
import socket

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memprof.monitor.probe import FOLDER
from memprof.monitor.probe.sitecustomize import SOCKET
from memprof.monitor.reports import Reports, _Counter


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 100), st.booleans(), st.booleans()), max_size=8), max_size=5))
def test_no_peak_is_missed_and_none_invented(intervals):
    """Against the truth: allocations, of which some are read, and peaks that the program resets now and then."""
    counter, peak, highest = _Counter(), 0, 0
    alive = 0
    for interval in intervals:
        truth = alive
        read = False
        for alive, is_read, is_reset in interval:
            truth, peak, highest = max(truth, alive), max(peak, alive), max(highest, alive)
            if is_read or (alive, is_read, is_reset) == interval[-1]:
                counter.add(alive, peak)
                read = True
            if is_reset:
                # The reset is seen, and what was before it not, unless it was read.
                counter.add(alive, peak)
                peak = alive
                counter.add(alive, peak)
        if read:
            assert counter.current <= counter.interval_peak <= truth
        assert counter.highest == highest
        counter.begin_interval()


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.lists(st.lists(st.integers(0, 100), min_size=1, max_size=8), max_size=5))
def test_a_peak_that_rises_is_exact(intervals):
    """With one reading at the end of each interval, however much happens in between."""
    counter, peak = _Counter(), 0
    for interval in intervals:
        rose = max(interval) > peak
        peak = max(peak, *interval)
        counter.add(interval[-1], peak)
        if rose:
            assert counter.interval_peak == max(interval)
        counter.begin_interval()


def _message(pid, started, current, peak, **more):
    counters = {
        "allocated_bytes": [current, peak],
        "reserved_bytes": [peak, peak],
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }
    return {"pid": pid, "started": started, "rank": None, "devices": {"0": counters}, "gpus": {}, **more}


@pytest.fixture
def listening():
    with Reports(1.0) as reports, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        reports.listen()
        address = reports.environment()[SOCKET]

        def send(message):
            sender.sendto(message if isinstance(message, bytes) else json.dumps(message).encode(), address)

        yield reports, send
    assert not os.path.exists(os.path.dirname(address))


def test_a_number_that_is_used_again_is_another_process(listening):
    reports, send = listening
    send(_message(7, 1.0, 10, 90))
    send(_message(7, 2.0, 5, 20))
    reports.drain()
    ((pid, (heard, _, (allocator,))),) = reports.collect().items()
    assert (pid, heard, allocator.allocated_bytes, allocator.max_allocated_bytes) == (7, True, 5, 20)
    assert reports.collect()[7][0] is False


def test_what_is_no_message_is_left_alone(listening):
    reports, send = listening
    for noise in (b"", b"\xff", b"[1]", b"{}", json.dumps(_message(1, 1.0, 1, 1) | {"devices": 3}).encode()):
        send(noise)
    send(_message(7, 1.0, 10, 90, rank="3"))
    reports.drain()
    found = reports.collect()
    assert found[7][1] == 3
    assert all(not allocators for pid, (_, _, allocators) in found.items() if pid != 7)


def test_path_of_the_command(monkeypatch):
    with Reports(0.5) as reports:
        monkeypatch.delenv("PYTHONPATH", raising=False)
        assert reports.environment()["PYTHONPATH"] == FOLDER
        monkeypatch.setenv("PYTHONPATH", "")
        assert reports.environment()["PYTHONPATH"] == FOLDER
        monkeypatch.setenv("PYTHONPATH", ":/a")
        assert reports.environment()["PYTHONPATH"] == f"{FOLDER}::/a"
    assert os.listdir(FOLDER) != []


def test_no_room_for_a_socket(monkeypatch):
    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("memprof.monitor.reports.tempfile.mkdtemp", refuse)
    with Reports(1.0) as reports:
        assert reports.environment() == {}
        reports.listen()
        assert reports.notes() == ["allocator statistics cannot be received: [Errno 28] No space left on device"]


def test_a_folder_for_temporary_files_with_a_long_name(monkeypatch, tmp_path):
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    monkeypatch.setattr("memprof.monitor.reports.tempfile.tempdir", str(folder))
    with Reports(1.0) as reports:
        assert reports.notes() == []
