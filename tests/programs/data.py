"""Small synthetic data in the formats that the corpus's programs read."""

from __future__ import annotations

import gzip
import json
import pickle
import random
from pathlib import Path

import numpy

_WORDS = (
    "the",
    "of",
    "and",
    "to",
    "a",
    "in",
    "that",
    "is",
    "was",
    "he",
    "for",
    "it",
    "with",
    "as",
    "his",
    "on",
    "be",
    "at",
)


def words(count: int, seed: int = 0) -> str:
    """So many words in lines of a dozen."""
    chosen = random.Random(seed).choices(_WORDS, k=count)
    return "O God, O God!\n" + "\n".join(" ".join(chosen[start : start + 12]) for start in range(0, count, 12)) + "\n"


def word_tokenizer(folder: Path) -> None:
    """A tokenizer of these words, as Hugging Face's libraries and others read one from a model's folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True)
    known = ["<unk>", "<s>", "</s>", *sorted(set(words(500).split()))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(known)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    tokenizer.save(str(folder / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    write_json(folder / "tokenizer_config.json", {**said, "pad_token": "<unk>"})


def idx(folder: Path, name: str, train: int = 512, test: int = 128) -> None:
    """MNIST's four files, as torchvision keeps them, under `folder`/`name`/raw."""
    raw = folder / name / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    numbers = numpy.random.default_rng(0)
    for split, count in (("train", train), ("t10k", test)):
        images = numbers.integers(0, 256, (count, 28, 28), dtype=numpy.uint8)
        labels = (numpy.arange(count) % 10).astype(numpy.uint8)
        for part, magic, values in (("images-idx3", 2051, images), ("labels-idx1", 2049, labels)):
            head = b"".join(number.to_bytes(4, "big") for number in (magic, *values.shape))
            content = head + values.tobytes()
            (raw / f"{split}-{part}-ubyte").write_bytes(content)
            (raw / f"{split}-{part}-ubyte.gz").write_bytes(gzip.compress(content))


def cifar(folder: Path, rows: int = 256) -> None:
    """CIFAR-10's pickles under `folder`/cifar-10-batches-py."""
    batches = folder / "cifar-10-batches-py"
    batches.mkdir(parents=True, exist_ok=True)
    numbers = numpy.random.default_rng(0)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        data = numbers.integers(0, 256, (rows, 3072), dtype=numpy.uint8)
        content = {"data": data, "labels": [row % 10 for row in range(rows)]}
        (batches / name).write_bytes(pickle.dumps(content))
    (batches / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(number) for number in range(10)]}))


def images(folder: Path, classes: int = 2, each: int = 16, size: int = 96) -> None:
    from PIL import Image

    numbers = numpy.random.default_rng(0)
    for label in range(classes):
        (folder / f"class{label}").mkdir(parents=True, exist_ok=True)
        for number in range(each):
            pixels = numbers.integers(0, 256, (size, size, 3), dtype=numpy.uint8)
            Image.fromarray(pixels).save(folder / f"class{label}" / f"{number}.png")


def tokens(file: Path, count: int, vocabulary: int) -> None:
    """Tokens of 16 bits, one after another."""
    file.parent.mkdir(parents=True, exist_ok=True)
    numpy.random.default_rng(0).integers(0, vocabulary, count).astype(numpy.uint16).tofile(file)


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def write_json(file: Path, content: object) -> None:
    write(file, json.dumps(content))


def cora(folder: Path, nodes: int = 2708, words_known: int = 1433, edges: int = 5429) -> None:
    """A citation graph in the two files of the Cora dataset."""
    numbers = random.Random(0)
    rows = []
    for node in range(nodes):
        bits = ["0"] * words_known
        for word in numbers.sample(range(words_known), 18):
            bits[word] = "1"
        rows.append(f"{node}\t" + "\t".join(bits) + f"\tclass{node % 7}")
    write(folder / "cora.content", "\n".join(rows) + "\n")
    write(
        folder / "cora.cites",
        "".join(f"{numbers.randrange(nodes)}\t{numbers.randrange(nodes)}\n" for _ in range(edges)),
    )
