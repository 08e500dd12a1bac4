"""Pythia-70M over the words of a corpus: with the report's fault, and mended. Factories for `memprof profile`."""

from __future__ import annotations

import vocabulary
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from memprof.workload.catalog import find_model


def every_word(vocab_size: int = 10_000) -> GPTNeoXForCausalLM:
    """`vocab_size` is taken and not used: there are as many tokens as the corpus has words."""
    return pythia(len(vocabulary.every_word(vocabulary.synthetic_corpus())))


def most_frequent(vocab_size: int = 10_000) -> GPTNeoXForCausalLM:
    """The most frequent words of the corpus, `vocab_size` with <unk>."""
    counts = vocabulary.Counter(vocabulary.synthetic_corpus())
    return pythia(len(vocabulary.most_frequent(counts, vocab_size)))


def pythia(vocab_size: int) -> GPTNeoXForCausalLM:
    """The model of the catalog with another vocabulary."""
    raw = {**find_model("pythia-70m").load_config(), "vocab_size": vocab_size}
    for name in ("model_type", "architectures", "dtype"):
        raw.pop(name, None)
    return GPTNeoXForCausalLM(GPTNeoXConfig(**raw))
