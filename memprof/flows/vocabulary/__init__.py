"""Token counts of a corpus, in bounded memory, and the memory that a smaller vocabulary saves.

    from memprof.flows.vocabulary.count import count_corpus
    counted = count_corpus("wiki.train.txt")
    counted.frequencies.find_cap(0.999)

Counting needs no torch, and `tokenizers` only for a tokenizer.json.
"""
