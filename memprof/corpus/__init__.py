"""What a corpus holds: tokens counted as they stream by, in bounded memory, and what a smaller vocabulary would cover.

    from memprof.corpus import count_corpus
    counted = count_corpus("wiki.train.txt")
    counted.frequencies.cap_for(0.999)

No torch. Of other packages `tokenizers` alone, where a tokenizer.json is named.
"""

from memprof.corpus.count import CorpusCount, count_corpus
from memprof.corpus.frequencies import Frequencies

__all__ = ["CorpusCount", "Frequencies", "count_corpus"]
