"""Golden render of `memprof vocab`: a small corpus by words, and one by ids, simulated.

`MEMPROF_BLESS=1 pytest tests/golden` writes them anew; read the difference before you commit it.
"""

from fractions import Fraction

import pytest

from memprof.flows.vocabulary import savings as vocab
from memprof.flows.vocabulary.count import CorpusCount
from memprof.flows.vocabulary.frequencies import Frequencies
from memprof.report.documents.vocabulary import SIMULATED, CapSavings, Vocabulary, VocabularyMemory
from memprof.report.terminal.console import to_text
from memprof.report.terminal.vocabulary import render
from memprof.spec import TargetSpec
from tests.golden.test_report import check

FREQUENCIES = Frequencies.of([20_000 // rank for rank in range(1, 20_001)])
MIB = 2**20


def by_words() -> Vocabulary:
    counted = CorpusCount(
        "whitespace", 1_234_567, FREQUENCIES, (("the", 20_000), ("of", 10_000), ("é", 6_666)), reserved=1,
        files=3, rows=12, notes=("wiki.txt: 2 bytes are undecodable and read as U+FFFD; the first is 0xe9.",),
    )  # fmt: skip
    caps = vocab.compute_caps(counted, [("99%", Fraction(99, 100)), ("90%", Fraction(9, 10))], requested_cap=500)
    savings = vocab.estimate_savings("1.2B", counted, caps, TargetSpec(model="none", context_length=4096, batch_size=8))
    return vocab.build_vocabulary(("wiki.txt", "more/*.jsonl"), counted, caps, savings, "0")


def by_ids() -> Vocabulary:
    counted = CorpusCount(
        "models/tokenizer.json", 999, FREQUENCIES, (("Ġthe", 20_000),), 32_000, 12_000, 31_999,
        ((0, 2), (9, 9), (20_002, 31_998)), ("<s>", "</s>"), 2,
    )  # fmt: skip
    caps = vocab.compute_caps(counted, [("99%", Fraction(99, 100))])
    before = VocabularyMemory(
        "before", 32_000, 70_000_000, 280 * MIB, 280 * MIB, 560 * MIB, 3000 * MIB, 5000 * MIB, 6000 * MIB, False
    )
    after = VocabularyMemory(
        "99%", 9_000, 40_000_000, 160 * MIB, 160 * MIB, 320 * MIB, 900 * MIB, 2000 * MIB, 2500 * MIB, True
    )
    savings = CapSavings(SIMULATED, "gpt2, batch 8 x 1,024 tokens, float32, adamw", "custom GPU", before, (after,), ())
    return vocab.build_vocabulary(("corpus.txt",), counted, caps, savings, "0")


def test_words():
    check("vocabulary_words.txt", to_text(render(by_words()), 100))


def test_ids():
    check("vocabulary_ids.txt", to_text(render(by_ids()), 100))


@pytest.mark.parametrize("width", [80, 110, 160])
@pytest.mark.parametrize("document", [by_words, by_ids])
def test_no_line_is_wider_than_the_terminal(document, width):
    assert max(map(len, to_text(render(document()), width).splitlines())) <= width
