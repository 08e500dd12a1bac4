"""Counting a corpus: exact against a plain Counter, whatever the blocks, the limits and the encoding."""

from __future__ import annotations

import collections
import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from memprof.errors import UsageError
from memprof.flows.vocabulary import spilling, text
from memprof.flows.vocabulary.count import count_corpus
from memprof.flows.vocabulary.frequencies import Frequencies
from memprof.flows.vocabulary.spilling import SpillingCounter
from memprof.flows.vocabulary.tally import Tally

counts_lists = st.lists(st.integers(0, 50), max_size=40)


# -- frequencies ---------------------------------------------------------------------------------------------------


@given(counts_lists, st.integers(0, 45))
def test_coverage_is_that_of_the_sorted_counts(counts, cap):
    frequencies = Frequencies.of(counts)
    ordered = sorted(counts, reverse=True)
    assert frequencies.total == sum(counts)
    assert frequencies.distinct == sum(count > 0 for count in counts)
    assert frequencies.count_covered_tokens(cap) == sum(ordered[:cap])
    assert frequencies.compute_coverage(cap) == (sum(ordered[:cap]) / sum(counts) if sum(counts) else 1.0)


@given(counts_lists, st.fractions(0, 1))
@example([1] * 10, Fraction(9, 10))
def test_a_cap_is_the_smallest_that_covers(counts, share):
    frequencies = Frequencies.of(counts)
    cap = frequencies.find_cap(share)
    assert frequencies.count_covered_tokens(cap) >= share * frequencies.total
    assert cap == 0 or frequencies.count_covered_tokens(cap - 1) < share * frequencies.total
    assert frequencies.find_cap(1) == frequencies.distinct


def test_a_share_is_the_decimal_that_is_written():
    # As a binary fraction 0.99 is a little more than 99 of 100, and would ask for one token more.
    assert Frequencies.of([1] * 100).find_cap(0.99) == Frequencies.of([1] * 100).find_cap("0.99") == 99


@pytest.mark.parametrize("share", [-0.1, 1.1, "2"])
def test_no_share(share):
    with pytest.raises(UsageError, match="from 0 to 1"):
        Frequencies.of([1]).find_cap(share)


# -- bounded memory ------------------------------------------------------------------------------------------------

words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n"), min_size=1, max_size=3)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(words, max_size=8), max_size=12), st.integers(1, 6), st.integers(2, 4))
def test_what_waits_on_disk_is_counted_exactly(monkeypatch, calls, max_words, max_runs):
    monkeypatch.setattr(spilling, "MAX_SPILL_FILES", max_runs)
    plain = collections.Counter(word for call in calls for word in call)
    with SpillingCounter(max_words) as counter:
        for call in calls:
            counter.update(call)
            assert len(counter._counts) <= max_words and len(counter._spill_files) <= max_runs
        assert dict(counter.items()) == plain
        assert counter._spill_files or len(plain) <= max_words
        assert counter.most_common(3) == sorted(plain.items(), key=lambda item: (-item[1], item[0]))[:3]
        folder = counter._folder
    assert folder is None or not Path(folder.name).exists()


# -- files ---------------------------------------------------------------------------------------------------------


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.text(st.sampled_from("ab é€😀\n\t\x85\u2003\r"), min_size=1, max_size=60),
    st.integers(1, 9),
    st.sampled_from(["utf-8", "utf-16", "utf-8-sig"]),
)
def test_words_against_a_plain_counter(monkeypatch, tmp_path, content, block, encoding):
    monkeypatch.setattr(text, "BLOCK_BYTES", block)
    monkeypatch.setattr(text, "BATCH_BYTES", block + 1)
    file = tmp_path / "corpus"
    file.write_bytes(content.encode(encoding))
    plain = collections.Counter(content.split())
    counted = count_corpus(file, encoding="utf-8" if encoding == "utf-8-sig" else encoding, show=100, max_words=2)
    assert dict(counted.most_common) == plain
    assert counted.frequencies == Frequencies.of(plain.values())
    assert counted.num_bytes == file.stat().st_size
    for lines in (False, True):
        codec = "utf-8" if encoding == "utf-8-sig" else encoding
        assert "".join(text.read_pieces(file, codec, lambda done: None, Tally(), lines=lines)) == content


@given(st.binary(min_size=1, max_size=200).filter(lambda c: not c.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ"))))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bytes_against_a_plain_counter(tmp_path, content):
    file = tmp_path / "corpus"
    file.write_bytes(content)
    counted = count_corpus(file, "bytes", show=256)
    plain = collections.Counter(content)
    assert dict(counted.most_common) == {repr(bytes([value]))[1:]: count for value, count in plain.items()}
    assert (counted.vocab_size, counted.unseen, counted.highest_id) == (256, 256 - len(plain), max(content))


@pytest.fixture
def tokenizer_file(tmp_path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"<unk>": 0, "the": 1, "cat": 2, "sat": 3, "never": 4, "late": 9}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


@pytest.mark.parametrize("folder", [False, True])
def test_ids_of_a_tokenizer(tokenizer_file, tmp_path, folder):
    file = tmp_path / "corpus"
    file.write_text("the cat sat\nthe dog sat\n\nthe late cat", encoding="utf-8")
    counted = count_corpus(file, str(tokenizer_file.parent if folder else tokenizer_file))
    assert counted.most_common == (("the", 3), ("cat", 2), ("sat", 2), ("<unk>", 1), ("late", 1))
    # Ids 5 to 8 are in nobody's vocabulary, and an embedding has rows for them all the same.
    assert (counted.vocab_size, counted.unseen, counted.highest_id) == (10, 5, 9)
    assert counted.frequencies.compute_coverage(3) == 7 / 9


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (None, {}, "cannot read the corpus"),
        (b"", {}, "the corpus is empty"),
        (b"", {"tokenizer": "bytes"}, "the corpus is empty"),
        (b"fine \xff\xfe", {}, "the corpus is not utf-8"),
        (b"fine \xe2\x82", {}, "the corpus is not utf-8"),
        (b"text", {"encoding": "utf-9"}, "unknown encoding"),
        (b"text", {"tokenizer": "nothing/here"}, "no tokenizer here"),
    ],
)
def test_errors(tmp_path, content, arguments, message):
    file = tmp_path / "corpus"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError, match=message) as error:
        count_corpus(file, **arguments)
    assert error.value.hint or "empty" in message


def test_not_a_tokenizer(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "corpus").write_text("text", encoding="utf-8")
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UsageError, match="not a tokenizer"):
        count_corpus(tmp_path / "corpus", str(tmp_path))


def test_a_word_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "BLOCK_BYTES", 10)
    monkeypatch.setattr(text, "MAX_WORD_CHARACTERS", 25)
    file = tmp_path / "corpus"
    file.write_bytes(b"a" * 25 + b" b")
    assert count_corpus(file).frequencies.total == 2
    file.write_bytes(b"a" * 40 + b" b")
    with pytest.raises(UsageError, match="a word of more than"):
        count_corpus(file)


def test_progress_ends_at_the_size(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "BLOCK_BYTES", 10)
    (tmp_path / "corpus").write_bytes(b"ab " * 10)
    told: list[int] = []
    count_corpus(tmp_path / "corpus", progress=told.append)
    assert told == [10, 20, 30]


@pytest.mark.nightly
def test_a_corpus_of_new_words_takes_bounded_memory(tmp_path):
    """8 million bytes of words that never repeat: a plain Counter takes more than 100 MB for them."""
    file = tmp_path / "corpus"
    file.write_text("\n".join(f"w{number}" for number in range(1_000_000)), encoding="utf-8")
    program = (
        "import json, sys; from memprof.flows.vocabulary.count import count_corpus\n"
        "words = int(sys.argv[2])\n"
        "found = count_corpus(sys.argv[1], max_words=words).frequencies\n"
        "status = open('/proc/self/status').read().splitlines()\n"
        "peak = next(int(line.split()[1]) for line in status if line.startswith('VmHWM'))\n"
        "print(json.dumps([found.distinct, found.total, 1024 * peak, 'torch' in sys.modules]))"
    )
    peaks = {}
    for max_words in (20_000, 10_000_000):
        done = subprocess.run(
            [sys.executable, "-c", program, file, str(max_words)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        distinct, total, peaks[max_words], torch = json.loads(done.stdout)
        assert distinct == total == 1_000_000 and not torch
    assert peaks[20_000] < 70 << 20 < 90 << 20 < peaks[10_000_000]
