"""Counts of a corpus: tokens counted as they stream by, in bounded memory, and what a smaller vocabulary would save.

    from memprof.flows.vocabulary.count import count_corpus
    counted = count_corpus("wiki.train.txt")
    counted.frequencies.cap_for(0.999)

Counting needs no torch, and of other packages `tokenizers` alone, where a tokenizer.json is named.
"""
