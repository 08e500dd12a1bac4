"""`memprof vocab`: counts, caps, what they save by a run and by arithmetic, and files that are no corpus."""

import gzip
import json
from pathlib import Path

import pytest

GPU = ("--gpu-vram", 16)
SMALL = ("--model", "pythia-70m", "--dtype", "float32", "--batch-size", 4, "--context-length", 128, *GPU)
WORDS = 3000


@pytest.fixture
def corpus(tmp_path) -> Path:
    """Word i of 3,000 occurs 3000 // (i + 1) times."""
    file = tmp_path / "corpus.txt"
    file.write_text("\n".join(" ".join([f"w{rank}"] * (WORDS // (rank + 1))) for rank in range(WORDS)))
    return file


def frequencies():
    return [WORDS // (rank + 1) for rank in range(WORDS)]


def find_cap(share):
    needed, cap = share * sum(frequencies()), 0
    while sum(frequencies()[:cap]) < needed:
        cap += 1
    return cap


def test_counts_and_caps(memprof, corpus):
    result = memprof("vocab", corpus, "--coverage", "50,99", "--cap", 100, "--json")
    assert result.exit_code == 0, result.stderr
    found = result.json
    total = sum(frequencies())
    assert (found["tokens"], found["distinct"], found["once"]) == (total, WORDS, WORDS // 2)
    assert found["num_bytes"] == corpus.stat().st_size
    assert found["most_common"][0] == ["w0", 3000]
    assert [(cap["name"], cap["tokens"]) for cap in found["caps"]] == [
        ("99%", find_cap(0.99)), ("asked", 100), ("50%", find_cap(0.5)),
    ]  # fmt: skip
    for cap in found["caps"]:
        assert cap["covered"] == sum(frequencies()[: cap["tokens"]])
        assert cap["vocab_size"] == cap["tokens"] + 1
    assert [point["tokens"] for point in found["curve"]][-3:] == [1000, 2000, 3000]
    assert found["curve"][-1]["coverage"] == 1
    for point in found["curve"]:
        assert point["coverage"] == pytest.approx(sum(frequencies()[: point["tokens"]]) / total)
    text = memprof("vocab", corpus).stdout
    assert f"{total:,} tokens, 3,000 different; 1,500 of them occur once (50.0%)" in text
    assert f"99%: {find_cap(0.99):,} tokens cover 99.0" in text


@pytest.mark.slow
@pytest.mark.nightly
def test_what_a_cap_saves_is_what_profile_says(memprof, corpus):
    found = memprof("vocab", corpus, *SMALL, "--coverage", "90", "--json").json["savings"]
    assert found["source"] == "simulated"
    before, (after,) = found["before"], found["capped"]
    assert (before["vocab_size"], after["vocab_size"]) == (WORDS + 1, find_cap(0.9) + 1)
    for memory in (before, after):
        report = memprof("profile", *SMALL, "--vocab-size", memory["vocab_size"], "--json").json
        assert memory["peak_bytes"] == report["peak"]["allocated_bytes"]
        assert memory["required_bytes"] == report["verdict"]["required_bytes"]
        assert memory["num_parameters"] == report["target"]["num_parameters"]
    # Embedding and head of Pythia-70M, 512 wide and not tied; AdamW has two states of each.
    fewer = before["vocab_size"] - after["vocab_size"]
    assert before["num_parameters"] - after["num_parameters"] == 2 * 512 * fewer
    assert before["parameters_bytes"] - after["parameters_bytes"] == 4 * 2 * 512 * fewer
    assert before["gradients_bytes"] - after["gradients_bytes"] == 4 * 2 * 512 * fewer
    assert before["optimizer_state_bytes"] - after["optimizer_state_bytes"] == 8 * 2 * 512 * fewer
    # Logits, their copy, log-softmax and its gradient, float32: more than one copy at a time.
    assert before["logits_bytes"] - after["logits_bytes"] > 2 * 4 * 4 * 128 * fewer


@pytest.mark.nightly
@pytest.mark.slow
def test_with_a_tokenizer_before_is_the_model(memprof, corpus, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(5000)}, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    result = memprof("vocab", corpus, "--tokenizer", tmp_path, *SMALL, "--json")
    assert result.exit_code == 0, result.stderr
    found = result.json
    assert (found["vocab_size"], found["unseen"], found["unseen_ranges"]) == (5000, 2000, [[3000, 4999]])
    assert found["savings"]["before"]["vocab_size"] == 50_304
    assert [memory["name"] for memory in found["savings"]["capped"]] == ["99.9%", "99%"]
    small = memprof("vocab", corpus, "--tokenizer", tmp_path, *SMALL, "--vocab-size", 2990, "--coverage", "100")
    assert "the id 2,999 and the model 2,990 rows" in small.stdout.replace("\n", " ")
    assert "nothing to save" in small.stdout


def test_no_vocabulary_fits(memprof, corpus):
    arguments = ("--model", "pythia-70m", "--context-length", 128, "--gpu-vram", 0.5, "--coverage", "99")
    result = memprof("vocab", corpus, *arguments)
    assert result.exit_code == 3
    assert any(line.split() == ["fits", "no", "no"] for line in result.stdout.splitlines())


def test_by_arithmetic(memprof, corpus):
    options = ("--params", "1.2B", "--dtype", "float32", "--context-length", 1024, "--batch-size", 2)
    result = memprof("vocab", corpus, *options, "--coverage", "90", "--json")
    assert result.exit_code == 0, result.stderr
    found = result.json["savings"]
    assert found["source"] == "arithmetic" and found["gpu"] is None
    before, (after,) = found["before"], found["capped"]
    fewer = before["vocab_size"] - after["vocab_size"]
    assert fewer == WORDS - find_cap(0.9)
    # Llama-shaped, 2,048 wide and tied at this size.
    assert before["parameters_bytes"] - after["parameters_bytes"] == 4 * 2048 * fewer
    assert before["optimizer_state_bytes"] - after["optimizer_state_bytes"] == 8 * 2048 * fewer
    assert before["logits_bytes"] == 4 * 2 * 1024 * (WORDS + 1)
    assert before["peak_bytes"] is None and before["fits"] is None
    assert "by arithmetic alone, nothing was run" in memprof("vocab", corpus, *options).stdout


def test_without_a_model_the_logits_alone(memprof, corpus):
    found = memprof("vocab", corpus, "--json").json["savings"]
    assert found["before"]["logits_bytes"] == 2 * 2048 * (WORDS + 1)
    assert found["before"]["parameters_bytes"] is None
    assert "the width is not known" in memprof("vocab", corpus).stdout


def test_several_files(memprof, corpus, tmp_path):
    (tmp_path / "more.txt.gz").write_bytes(gzip.compress(b"w0 new"))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"body": "w0"}) + "\nno json\n")
    found = memprof("vocab", corpus, tmp_path / "*.gz", "--json").json
    assert found["files"] == 2 and found["distinct"] == WORDS + 1 and found["most_common"][0] == ["w0", 3001]
    result = memprof("vocab", tmp_path / "rows.jsonl", "--column", "body")
    assert result.exit_code == 0
    assert "1 file, 1 row, 2 bytes of text" in result.stdout
    assert "1 row left out; the first is line 2" in " ".join(result.stdout.split())


def test_undecodable_bytes_are_named(memprof, corpus):
    corpus.write_bytes(corpus.read_bytes() + b" caf\xe9")
    result = memprof("vocab", corpus)
    assert result.exit_code == 0
    place = corpus.stat().st_size - 1
    assert f"1 byte is undecodable and read as U+FFFD; the first is 0xe9 near byte {place:,}" in " ".join(
        result.stdout.split()
    )


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (b"", (), "the corpus is empty"),
        (b" \n\t", (), "no token in the corpus"),
        (b"\x7fELF\0\0\0", (), "the corpus is binary"),
        (b"caf\xe9", (), "the corpus is not utf-8"),
        (b"a", ("--encoding", "klingon"), "unknown encoding"),
        (b"a", ("--tokenizer", "gpt5"), "no tokenizer here"),
        (b"a", ("--coverage", "banana"), "--coverage has no percentage in it"),
        (b"a", ("--coverage", "99,101"), "--coverage has no percentage in it"),
        (b"a", ("--coverage", "nan"), "--coverage has no percentage in it"),
        (b"a", ("--coverage", ""), "--coverage takes one to six"),
        (b"a", ("--cap", 0), "--cap must be at least 1"),
        (b"a", ("--params", "banana"), "not a number of parameters"),
        (b"a", ("--params", "1B", "--model", "gpt2"), "give --model or --params"),
        (b"a", ("--params", "1B", "--optimizer", "adafactor"), "the state of adafactor"),
        (b"a", ("--model", "gpt-9000"), "model"),
        (b"a", ("--model", "gpt2", "--gpu", "h1000"), "unknown GPU"),
        (b"a", ("--model", "gpt2", "--gpu", "rtx-4090", "--gpu-vram", 8), "give --gpu or --gpu-vram, not both"),
        (b"a", ("--batch-size", 0), "--batch-size must be at least 1"),
        (b"a", ("--column", "text"), "no row has text"),
    ],
)
def test_bad_input(memprof, tmp_path, content, arguments, message):
    (tmp_path / "corpus").write_bytes(content)
    result = memprof("vocab", tmp_path / "corpus", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr and "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) <= 3


def test_no_such_file(memprof, tmp_path):
    result = memprof("vocab", tmp_path / "nowhere.txt")
    assert result.exit_code == 2 and "no such file or folder" in result.stderr
    result = memprof("vocab", tmp_path / "*.txt")
    assert result.exit_code == 2 and "no file matches" in result.stderr
