"""What is wrong with a command is said before torch is imported, as one error: problem, value, and what to do.

`python -m tests.benchmarks.commands --only wrong` measures how long that takes.
"""

import json

from tests.adversarial.harmless import LEAN
from tests.processes import python

# The command line as the console script has it, use by use: what each says, and what is imported when it has ended.
RUN = """
import contextlib, io, json, sys
from memprof.cli.main import run
ended = []
for words in json.loads(sys.argv[1]):
    out, err, code = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run(words)
        except SystemExit as done:
            code = done.code
    heavy = [name for name in ("torch", "transformers", "pandas", "numpy") if name in sys.modules]
    ended.append((code, heavy, out.getvalue(), err.getvalue()))
print(json.dumps(ended))
"""

# Words, then parts of the problem, of the value ("": none can be shown) and of the hint.
USES = [
    ("run nosuch.py", "no such script", "nosuch.py", "path of a Python file"),
    ("run -m nosuch.module", "no such module", "nosuch.module", "-m takes a name"),
    ("run --gpu nosuch train.py", "unknown GPU", "nosuch", "--gpu-vram"),
    ("run --gpus 0 train.py", "--gpus must be at least 1", "0", "positive whole number"),
    ("run --gpus 2 --ranks 0,9 train.py", "there is no such rank", "0,9 of 2", "count from 0"),
    ("run --gpus 2 --rank 3 train.py", "there is no such rank", "--rank 3 of 2", "count from 0"),
    ("run --fix nosuch train.py", "unknown fix", "nosuch", "known:"),
    ("run --alloc-conf nosuch:1 train.py", "unknown allocator setting", "nosuch:1", "expandable_segments"),
    ("run --steps 2 --until-exit train.py", "not both", "--steps 2", "leave one out"),
    ("profile", "give --model or --model-size", "", "memprof profile --model-size 4B"),
    ("profile --model nosuch", "unknown model", "nosuch", "`memprof models`"),
    ("profile --model-size banana", "not a number of parameters", "banana", "1.2B"),
    ("profile --model nosuch.py:build", "no such file", "nosuch.py", ":factory"),
    ("profile --model gpt2 --gpu nosuch", "unknown GPU", "nosuch", "--gpu-vram"),
    ("profile --model gpt2 --gpu-vram 8X", "not an amount of memory", "8X", "24GB"),
    ("profile --model gpt2 --gpus 2 --parallel nosuch", "unknown part", "nosuch", "fsdp"),
    ("profile --model gpt2 --gpus 5 --parallel tp=5", "cannot be divided by 5", "tp=5", "tp=4"),
    ("profile --model gpt2 --preset nosuch", "unknown --preset", "nosuch", "long-context"),
    ("profile --model gpt2 --fix nosuch", "unknown fix", "nosuch", "known:"),
    ("profile --model gpt2 --fix auto --ladder", "not both", "--fix auto", "a ladder of its own"),
    ("profile --model gpt2 --fix chunked-loss --mode inference", "does not apply", "--mode inference", "training"),
    ("profile --model gpt2 --optimizer nosuch", "unknown --optimizer", "nosuch", "adamw"),
    ("profile --model gpt2 --dtype bf17", "unknown --dtype", "bf17", "bfloat16"),
    ("profile --model gpt2 --batch-size -1", "--batch-size must be at least 1", "-1", "positive whole number"),
    ("profile --model gpt2 --lengths nosuch", "cannot be read", "nosuch", "lognormal"),
    ("profile --model gpt2 --html nowhere/page.html", "no such folder", "nowhere", "--html"),
    ("profile --model vit-base --vocab-size 10", "--vocab-size does not apply", "vit-base", "leave it out"),
    ("profile --model vit-base --mode inference --new-tokens 5", "--new-tokens", "vit-base", "leave it out"),
    ("recommend --model nosuch", "unknown model", "nosuch", "`memprof models`"),
    ("recommend --gpu nosuch", "unknown GPU", "nosuch", "--gpu-vram"),
    ("recommend --adapter lora", "--adapter needs a model", "lora", "--model"),
    ("recommend --model gpt2 --lengths nosuch", "no such file of lengths", "nosuch", "one length a line"),
    ("recommend --model gpt2 --snippet device-map", "for several GPUs", "device-map", "--gpus 8"),
    ("estimate", "give one of --params", "", "memprof estimate --params"),
    ("estimate --params 1B --parallel tp=2", "over several GPUs", "tp=2", "--gpus 8"),
    ("show nosuch.memprof", "cannot read the file", "nosuch.memprof", "a capture"),
    ("show train.py", "not a memprof capture", "train.py", "a capture"),
    ("analyze train.py", "not a memory snapshot", "train.py", "_dump_snapshot"),
    ("compare train.py", "missing argument 'b'", "", "compare --help"),
    ("compare train.py train.py", "neither a capture", "train.py", "a report (--json)"),
    ("compare a b --tolerance x", "not a tolerance", "--tolerance x", "16MiB"),
    ("export train.py --to run.txt", "not a kind of file to export to", "run.txt", "name.pickle"),
    ("doctor nosuch.log", "no such file", "nosuch.log", "standard input"),
    ("doctor train.py --model nosuch", "unknown model", "nosuch", "memprof models"),
    ("models nosuch", "unexpected extra argument", "nosuch", "models --help"),
    ("estimate gpt2", "unexpected extra argument", "gpt2", "estimate --model gpt2"),
    ("gpus --nosuch", "no such option", "--nosuch", "gpus --help"),
    ("verify nosuch", "unknown fix", "nosuch", "known:"),
    ("verify --model nosuch", "unknown model", "nosuch", "`memprof models`"),
    ("verify --seeds 0", "--seeds must be at least 1", "0", "positive whole number"),
    ("vocab nosuch", "cannot read the corpus", "nosuch", "no such file"),
    ("vocab train.py --model nosuch", "unknown model", "nosuch", "`memprof models`"),
    ("monitor --interval 0", "interval is too short", "0", "seconds or more"),
    ("cache --nosuch", "no such option", "--nosuch", "cache --help"),
    ("help nosuch", "unknown topic", "nosuch", "memprof help lists them"),
    ("recipes run nosuch", "unknown recipe", "nosuch", "known:"),
    ("nosuch", "no such command", "nosuch", "--help"),
    ("nosuch.py", "no such file", "nosuch.py", "a script (.py)"),
]


def test_they_are_refused_before_torch_is_imported(tmp_path):
    (tmp_path / "train.py").write_text("import torch\n", encoding="utf-8")
    done = python("-c", RUN, json.dumps([use[0].split() for use in USES]), folder=tmp_path, libraries=LEAN)
    assert done.exit_code == 0, done.stderr
    for use, (code, heavy, out, said) in zip(USES, json.loads(done.stdout), strict=True):
        assert (code, heavy, out) == (2, [], ""), (use, said)
        names = ["memprof", "  value", "  hint"] if use[2] else ["memprof", "  hint"]
        lines = said.splitlines()
        assert [line.partition(":")[0] for line in lines] == names, use
        parts = [part for part in use[1:] if part]
        assert [part in line for part, line in zip(parts, lines, strict=True)] == [True] * len(parts), said
