"""What a corpus may be: folders, patterns, compressed files, rows; and what is left out is counted and named."""

from __future__ import annotations

import bz2
import collections
import gzip
import json
import lzma
import os
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memprof.errors import MemprofError, UsageError
from memprof.flows.vocabulary import count, text
from memprof.flows.vocabulary.count import count_corpus

TEXT = "the cat sat\non the mat\n"
COUNTS = {"the": 2, "cat": 1, "sat": 1, "on": 1, "mat": 1}


def counts(*arguments, **options):
    return dict(count_corpus(*arguments, show=100, **options).most_common)


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
@pytest.mark.parametrize("tokenizer", ["whitespace", "bytes"])
def test_compressed(tmp_path, compress, tokenizer):
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    plain.write_text(TEXT)
    packed.write_bytes(compress(TEXT.encode()))
    told = []
    found = count_corpus(packed, tokenizer, progress=told.append)
    assert found == count_corpus(plain, tokenizer)
    assert found.num_bytes == len(TEXT) and told[-1] == packed.stat().st_size


@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress])
def test_damaged(tmp_path, compress):
    packed = tmp_path / "corpus.gz"
    packed.write_bytes(compress(os.urandom(5000).hex().encode())[:-3000])
    with pytest.raises(UsageError, match="truncated or damaged"):
        count_corpus(packed)


def test_a_folder(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "b.txt.gz").write_bytes(gzip.compress(TEXT.encode()))
    (tmp_path / "below" / "c.jsonl").write_text(json.dumps({"text": "cat"}))
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "nothing").write_bytes(b"")
    (tmp_path / ".hidden").write_text("hidden")
    found = count_corpus(tmp_path, show=100)
    assert dict(found.most_common) == {word: 2 * many + (word == "cat") for word, many in COUNTS.items()}
    assert (found.files, found.rows) == (3, 1)
    assert found.notes == (
        f"Left out, empty: {tmp_path / 'nothing'}.",
        f"Left out, binary: {tmp_path / 'picture.png'}.",
    )


def test_patterns_and_each_file_once(tmp_path):
    for name in ("a.txt", "b.txt", "c.md"):
        (tmp_path / name).write_text(TEXT)
    found = count_corpus([str(tmp_path / "*.txt"), tmp_path / "a.txt", tmp_path / "c.md"])
    assert (found.files, found.frequencies.total) == (3, 18)


def test_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(TEXT,))
    writer.start()
    assert counts(pipe) == COUNTS
    writer.join()


def test_a_file_that_vanishes(tmp_path, monkeypatch):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(TEXT)
    find = count.find_sources

    def find_and_lose(*arguments):
        found = find(*arguments)
        (tmp_path / "b.txt").unlink()
        return found

    monkeypatch.setattr(count, "find_sources", find_and_lose)
    found = count_corpus(tmp_path, show=100)
    assert dict(found.most_common) == COUNTS and found.files == 1
    assert found.notes == (f"Left out, vanished before it was read: {tmp_path / 'b.txt'}.",)
    (tmp_path / "b.txt").write_text(TEXT)
    with pytest.raises(UsageError, match="cannot read the corpus"):  # the user named it
        count_corpus([tmp_path / "a.txt", tmp_path / "b.txt"])


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"a\0b", {}, "is binary"),
        ("text".encode("utf-16"), {}, "encoding utf-16"),
        (b"text", {"encoding": "hex"}, "unknown encoding"),
        (b"texts", {"encoding": "utf-16"}, "is not utf-16"),
        (b"PK no rows", {"column": "text"}, "no row has text"),
        (b'{"body": "a", "id": 1}\n', {"column": "text"}, "there are body"),
        (b'{"text": ""}\n', {"column": "text"}, "the corpus is empty"),
    ],
)
def test_what_is_no_text(tmp_path, content, options, message):
    file = tmp_path / "corpus"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        count_corpus(file, **options)


def test_only_empty_files(tmp_path):
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / "b").write_bytes(b"")
    with pytest.raises(UsageError, match="the corpus is empty"):
        count_corpus(tmp_path)
    (tmp_path / "none").mkdir()
    with pytest.raises(UsageError, match="no file in this folder"):
        count_corpus(tmp_path / "none")


# -- undecodable bytes -----------------------------------------------------------------------------------------------


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from([b"ab ", "é ".encode(), b"\xff", b"\xe2\x82", b"\x80 "]), max_size=12), st.integers(1, 5)
)
def test_undecodable_bytes_are_counted(monkeypatch, tmp_path, parts, block):
    """Against Python's own decoder, wherever the blocks end."""
    content = b"".join(parts) + b" fine" * 1000
    monkeypatch.setattr(text, "BLOCK_BYTES", block)
    file = tmp_path / "corpus"
    file.write_bytes(content)
    found = count_corpus(file, show=10_000)
    assert dict(found.most_common) == collections.Counter(content.decode("utf-8", "replace").split())
    told = [note for note in found.notes if "undecodable" in note]
    assert bool(told) == ("\ufffd" in content.decode("utf-8", "replace"))
    if told:
        first = _first_wrong(content)
        assert f"near byte {first:,}:" in told[0]
        assert f": {_wrong_bytes(content):,} byte" in told[0]


def _first_wrong(content):
    with pytest.raises(UnicodeDecodeError) as error:
        content.decode("utf-8")
    return error.value.start


def _wrong_bytes(content):
    wrong = 0
    while True:
        try:
            content.decode("utf-8")
        except UnicodeDecodeError as error:
            wrong += error.end - error.start
            content = content[error.end :]
        else:
            return wrong


def test_a_text_in_another_encoding(tmp_path):
    file = tmp_path / "corpus"
    file.write_bytes("déjà vu ".encode("latin-1") * 100)
    with pytest.raises(UsageError, match="is not utf-8") as error:
        count_corpus(file)
    assert "200 of 800 bytes, the first is 0xe9 near byte 1:" in error.value.value
    assert counts(file, encoding="latin-1") == {"déjà": 100, "vu": 100}


# -- rows ------------------------------------------------------------------------------------------------------------

ROWS = [{"text": "the cat", "body": "x"}, {"text": None}, {"body": "y"}, {"text": "the é\nmat"}]


def test_json_lines(tmp_path):
    file = tmp_path / "corpus.jsonl"
    lines = [*map(json.dumps, ROWS), "", "{not", "[1]", json.dumps({"text": "\ud800 the"})]
    file.write_text("\n".join(lines))
    found = count_corpus(file, show=100)
    assert dict(found.most_common) == {"the": 3, "cat": 1, "é": 1, "mat": 1, "?": 1}
    assert found.rows == 3 and found.num_bytes == len("the cat") + len("the é\nmat".encode()) + len("? the")
    assert found.notes == (f"{file}: 4 rows left out; the first is line 2, without text in 'text'.",)
    assert counts(file, column="body") == {"x": 1, "y": 1}
    file.rename(tmp_path / "corpus.txt")
    assert counts(tmp_path / "corpus.txt", column="body") == {"x": 1, "y": 1}


def test_rows_are_batched_and_bounded(tmp_path, monkeypatch):
    from memprof.flows.vocabulary import rows

    monkeypatch.setattr(text, "BATCH_BYTES", 10)
    monkeypatch.setattr(rows, "MAX_ROW_CHARACTERS", 40)
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps({"text": f"a w{number}"}) + "\n" for number in range(20)))
    assert counts(file)["a"] == 20
    file.write_text(json.dumps({"text": "a " * 50}))
    with pytest.raises(UsageError, match="a row of more than"):
        count_corpus(file)


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow reads Parquet, and is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "corpus.parquet"
    texts = ["the cat", None, "the é"] * 100
    parquet.write_table(pyarrow.table({"text": texts, "n": list(range(300))}), file, row_group_size=70)
    found = count_corpus(tmp_path / "*.parquet", show=100)
    assert dict(found.most_common) == {"the": 200, "cat": 100, "é": 100}
    assert found.rows == 200 and "100 rows left out" in found.notes[0]
    with pytest.raises(UsageError, match="no column of text is called 'n'") as error:
        count_corpus(file, column="n")
    assert error.value.hint == "give --column: there are text"
    content = file.read_bytes()
    file.write_bytes(content[:-20])
    with pytest.raises(UsageError, match="not a Parquet file"):
        count_corpus(file)


def test_a_full_disk(tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryDirectory", full)
    (tmp_path / "corpus").write_text(" ".join(map(str, range(100))))
    with pytest.raises(MemprofError, match="could not be kept") as error:
        count_corpus(tmp_path / "corpus", max_words=10)
    assert error.value.exit_code == 1


def test_ids_that_never_occur(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<unk>": 0, "the": 1, "cat": 2, "x": 3}, unk_token="<unk>")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<unk>", "<eos>"])
    made.add_tokens(["added"])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "corpus").write_text("the cat\nthe dog")
    found = count_corpus(tmp_path / "corpus", str(tmp_path))
    assert (found.vocab_size, found.unseen, found.unseen_ranges) == (6, 3, ((3, 5),))
    assert found.special_unseen == ("<eos>",) and found.reserved == 1
    # A row is one document, its line ends are the tokenizer's.
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "the\nthe"}))
    assert count_corpus(tmp_path / "rows.jsonl", str(tmp_path)).frequencies.total == 2
