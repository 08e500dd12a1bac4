"""Passages of a log: where an error starts, how much stands around it, how many are looked at, and what is no log."""

from __future__ import annotations

import io

import pytest

from memprof.doctor.log import LogReader
from memprof.doctor.log_lines import Passage
from memprof.errors import UsageError

ERROR = b"CUDA out of memory. Tried to allocate 2.00 GiB."
KIB = 1 << 10


def passages(data: bytes) -> list[Passage]:
    return list(LogReader(io.BytesIO(data), "log").read_passages())


def test_the_text_before_an_error_and_from_its_line_on():
    assert passages(b"one\ntwo\nx: " + ERROR + b"\nthree") == [Passage("one\ntwo\n", f"x: {ERROR.decode()}\nthree", 3)]
    assert passages(ERROR) == [Passage("", ERROR.decode(), 1)]
    assert passages(b"") == []
    assert passages(b"nothing of interest\n" * 9) == []


def test_a_progress_bar_is_not_of_the_error_s_line():
    (found,) = passages(b"one\n10%|#  |\r20%|## |\r" + ERROR)
    assert found == Passage("one\n10%|#  |\r20%|## |\r", ERROR.decode(), 2)


def test_a_line_without_end_is_cut():
    (found,) = passages(b"." * 5000 + ERROR)
    assert found.text_before + found.text_after == "." * 5000 + ERROR.decode()
    assert found.text_after.index("of memory") == 2048
    assert found.line == 1


def test_24_kib_before_and_4_after():
    (found,) = passages(b"a\n" * (20 * KIB) + ERROR + b"\n" + b"b\n" * (4 * KIB))
    assert len(found.text_before) == 24 * KIB
    assert len(found.text_after) == 4 * KIB + ERROR.index(b"of memory")
    assert found.line == 20 * KIB + 1


def test_an_error_is_found_once_a_line():
    text = ERROR + b" " + ERROR + b"\n"
    assert [one.line for one in passages(text + b"\n" + text)] == [1, 3]


def test_what_stands_before_an_error_is_from_the_beginning_of_a_long_log():
    after = b"\n" + b"x\n" * (20 * KIB)
    assert [(one.text_before, one.line) for one in passages(b"\none\n" + ERROR + after)] == [("\none\n", 3)]
    assert [(one.text_before, one.line) for one in passages(b"\n" + ERROR + after)] == [("\n", 2)]


def test_an_error_of_another_wording_in_a_long_line_is_found_after_4_kib():
    """2 KiB of a line belong to an error on either side."""
    for distance, lines in ((4095, [1]), (4096, [1, 1])):
        begin = b"CUDA out "
        found = passages(begin + b"of memory".ljust(distance, b".") + b"OutOfMemoryError")
        assert [one.line for one in found] == lines
    assert found[1].text_after.index("OutOfMemoryError") == 2048


def test_words_of_an_error_are_in_one_line():
    assert [one.line for one in passages(b"it will allocate more\n\nTried to allocate 2 GiB\n")] == [3]
    assert [one.line for one in passages(b"Tried to allocate 2 GiB\n\nit will allocate more\n")] == [1]


def test_bytes_that_are_no_text_are_replaced():
    log = LogReader(io.BytesIO(b"\xff\n" + ERROR + b"\xfe"), "log")
    (found,) = log.read_passages()
    assert (found.text_before, found.text_after[-1], log.head[:2]) == ("\ufffd\n", "\ufffd", "\ufffd\n")


def test_at_most_60_passages_of_one_wording():
    assert [one.line for one in passages((ERROR + b"\n") * 61)] == list(range(1, 61))
    both = passages((ERROR + b"\n") * 61 + b"Killed\n")
    assert both[-1].line == 62


def test_the_beginning_of_a_log_is_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("memprof.doctor.log._CHUNK_BYTES", 100 * KIB)
    log = LogReader(io.BytesIO(b"x" * (300 * KIB)), "log")
    assert list(log.read_passages()) == []
    assert log.head == "x" * (256 * KIB)


@pytest.mark.parametrize("chunk", [7 * KIB, 8 * KIB, 64 * KIB])
def test_lines_are_counted_over_pieces(monkeypatch: pytest.MonkeyPatch, chunk: int):
    monkeypatch.setattr("memprof.doctor.log._CHUNK_BYTES", chunk)
    filler = b"step 1\n" * 10_000
    found = passages(filler + ERROR + b"\n" + filler + ERROR)
    assert [one.line for one in found] == [10_001, 20_002]
    assert all(one.text_after.startswith(ERROR.decode()) for one in found)
    assert all(len(one.text_before) == 24 * KIB for one in found)


@pytest.mark.parametrize(
    ("begin", "words"),
    [
        (b"\x1f\x8b", ["gzip", "zcat"]),
        (b"PK\x03\x04", ["zip"]),
        (b"\x28\xb5\x2f\xfd", ["zstd", "zstdcat"]),
        (b"BZh", ["bzip2", "bzcat"]),
        (b"\xfd7zXZ", ["xz", "xzcat"]),
        (b"\x7fELF", ["program"]),
        (b"\x89PNG", ["picture"]),
        (b"\xff\xd8\xff", ["picture"]),
        (b"%PDF", ["PDF"]),
        (b"\x80\x02", ["pickle", "analyze"]),
        (b"\x80\x05", ["pickle", "analyze"]),
    ],
)
def test_what_is_another_kind_of_file(begin: bytes, words: list[str]):
    with pytest.raises(UsageError) as refused:
        passages(begin + ERROR)
    assert [word for word in words if word not in f"{refused.value.problem} {refused.value.hint}"] == []
    assert refused.value.value == "log"


@pytest.mark.parametrize(("controls", "is_text"), [(22, True), (23, False)])
def test_one_byte_in_50_may_control_a_terminal(controls: int, is_text: bool):
    data = b"\x01" * (controls // 2) + b"\x02" * (controls - controls // 2) + b"a" * (1000 - controls)
    if is_text:
        assert passages(data) == []
    else:
        with pytest.raises(UsageError) as refused:
            passages(data)
        assert refused.value.value == "log"


def test_what_terminals_take_is_text():
    assert passages(bytes([7, 8, 9, 10, 11, 12, 13, 27]) * 100) == []


def test_only_the_beginning_is_looked_at_for_what_is_no_text():
    assert passages(b"a" * 65536 + b"\x01" * 9999) == []


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_text_of_two_bytes_a_character(encoding: str):
    (found,) = passages(("\ufeffone\n" + ERROR.decode()).encode(encoding))
    assert (found.text_after, found.line) == (ERROR.decode(), 2)
