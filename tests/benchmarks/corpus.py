"""Counting the tokens of a 100 MB text: time and memory, beside a plain Counter over its lines.

    python -m tests.benchmarks.corpus [--megabytes 100] [--file FILE]

Each way runs in a process of its own: seconds of processor time from opening the file to the cap for 99.9% (imports
apart; the tokenizer uses several threads, and all of them count), and the peak of resident memory. The text is
synthetic (words by Zipf's law, and one in 50 that never comes again: numbers, names, misspellings) unless a file is
given. Exit code 1 if one of the counts takes 512 MiB or more, or is not the plain one's.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from itertools import accumulate
from pathlib import Path

LIMIT_BYTES = 512 << 20

PLAIN = """
from collections import Counter
counts = Counter()
with open(path, encoding="utf-8") as lines:
    for line in lines:
        counts.update(line.split())
left, cap = 0.999 * counts.total(), 0
for _, count in counts.most_common():
    if left <= 0:
        break
    left -= count
    cap += 1
result = [counts.total(), len(counts), cap]
"""
OURS = """
found = count_corpus(path, tokenizer).frequencies
result = [found.total, found.distinct, found.find_cap(0.999)]
"""
PROGRAM = """
import json, sys, time
from memprof.flows.vocabulary.count import count_corpus
path, tokenizer = sys.argv[1:3]
begin = time.process_time()
{body}
seconds = time.process_time() - begin
status = open("/proc/self/status").read().splitlines()
peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
print(json.dumps([result, seconds, 1024 * peak]))
"""


def write(path: Path, num_bytes: int) -> None:
    """A text of about `num_bytes`, the same on every machine."""
    draw = random.Random(0)
    letters = "etaoinshrdlcumwfgypbvk"
    words = ["".join(draw.choices(letters, k=draw.randint(2, 9))) for _ in range(200_000)]
    weights = list(accumulate(1 / (rank + 2.7) for rank in range(len(words))))
    written = number = 0
    with path.open("w", encoding="utf-8") as file:
        while written < num_bytes:
            line = draw.choices(words, cum_weights=weights, k=1000)
            for place in range(0, 1000, 50):
                line[place] = f"x{number}"
                number += 1
            written += file.write(" ".join(line) + "\n")


def write_tokenizer(path: Path, corpus: Path) -> None:
    """A byte-pair encoding of 16,000 tokens, trained on the first megabytes of the text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=16_000, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    with corpus.open(encoding="utf-8") as lines:
        made.train_from_iterator([line for line, _ in zip(lines, range(500), strict=False)], trainer)
    made.save(str(path))


def measure(body: str, path: Path, tokenizer: str) -> tuple[list[int], float, int]:
    program = PROGRAM.format(body=body)
    done = subprocess.run(
        [sys.executable, "-c", program, path, tokenizer], stdout=subprocess.PIPE, text=True, check=True
    )
    result, seconds, peak = json.loads(done.stdout)
    return result, seconds, peak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--file", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.file or Path(folder) / "corpus.txt"
        if arguments.file is None:
            write(path, arguments.megabytes * 10**6)
        tokenizer = Path(folder) / "tokenizer.json"
        write_tokenizer(tokenizer, path)
        size = path.stat().st_size
        plain, seconds, peak = measure(PLAIN, path, "")
        print(f"{size / 1e6:.0f} MB, {plain[0]:,} words, {plain[1]:,} different, {plain[2]:,} for 99.9%")
        print(f"{'plain Counter':<16}{seconds:8.1f} s{size / 1e6 / seconds:8.1f} MB/s{peak >> 20:6} MiB")
        good = True
        for name, way in (("whitespace", "whitespace"), ("bytes", "bytes"), ("tokenizer.json", str(tokenizer))):
            found, seconds, peak = measure(OURS, path, way)
            good &= peak < LIMIT_BYTES and (way != "whitespace" or found == plain)
            print(f"{name:<16}{seconds:8.1f} s{size / 1e6 / seconds:8.1f} MB/s{peak >> 20:6} MiB")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
