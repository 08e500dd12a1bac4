"""The host, from files as Linux writes them."""

from __future__ import annotations

import os
import platform

import pytest

from memprof.device import host


def test_the_processor_is_named_by_the_first_line_that_does(tmp_path, monkeypatch):
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(host, "_CPUINFO", file)
    for text, name in (
        ("processor\t: 0\nmodel name\t: \nmodel name\t: Intel(R) Xeon(R) @ 2.10GHz\nmodel name\t: another", "Intel(R)"),
        ("CPU part: 0xd0c\nHardware\t: Apple M1 \xe9", "Apple M1"),
    ):
        file.write_bytes(text.encode("latin-1"))
        assert host.processor_name().startswith(name)
    file.unlink()
    for processor, machine, name in (("x86", "arm", "x86"), ("", "arm", "arm"), ("", "", "CPU")):
        monkeypatch.setattr(platform, "processor", lambda value=processor: value)
        monkeypatch.setattr(platform, "machine", lambda value=machine: value)
        assert host.processor_name() == name


def test_memory_is_counted_in_bytes(tmp_path, monkeypatch):
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:       32768 kB\nMemFree:  5 kB\nMemAvailable:    4096 kB")
    monkeypatch.setattr(host, "_MEMINFO", file)
    assert (host.memory_bytes(), host.available_bytes()) == (32 << 20, 4 << 20)


@pytest.mark.parametrize("text", ["", "MemTotal:\nMemAvailable:\n", "MemTotal: many kB\nMemAvailable: few kB"])
def test_memory_that_the_file_does_not_tell(tmp_path, monkeypatch, text):
    file = tmp_path / "meminfo"
    file.write_text(text)
    monkeypatch.setattr(host, "_MEMINFO", file)
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert (host.memory_bytes(), host.available_bytes()) == (4_096_000, None)
