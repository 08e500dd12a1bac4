"""Other tools on the same work, side by side: what they take, and how far their answer is from what was measured.

    pip install --target PEERS hf-mem==0.5.6 fitcheck-llm==0.3.1
    python -m tests.benchmarks.peers --peers PEERS [--repeat 3] [--only WORK ...]

Each line is a process of its own. `seconds` pass, `processor` are of all its processes, `memory` is the largest one's
resident memory, `answer` the figure that the tool gives for what was measured; the difference is signed. Tools that
read a hub read one on this machine (tests/benchmarks/hub.py), so that no network is in their seconds.

What was measured, by others:

* `lora`: the peak that torch had allocated in a step of Qwen2.5-0.5B, LoRA of rank 16 on its attention, bfloat16,
  1,024 tokens, checkpointed, bitsandbytes' paged 8-bit AdamW: 3.0324 GiB (github.com/DaoyuanLi2816/can-i-finetune-this,
  benchmarks/results, RTX 4080).
  MemTracker has no line there: it registers hooks on parameters that need no gradient, which torch refuses.
* `full`: nothing; what each of them says of the same two steps.
* `generate`: Qwen3-4B in bfloat16, a prompt of 30,720 tokens and 2,048 new ones: 12,317 MiB (Qwen3's
  docs/source/getting_started/speed_benchmark.md, H20): what is held while decoding, as the figures' own differences
  show (tests/accuracy/inference_rows.py). A whole call holds more, in the prefill.
* `snapshot`: nothing; a snapshot as torch writes it, of 20 MB, read and shown.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from memprof.units import GIB, MIB
from tests.benchmarks.commands import ROOT
from tests.benchmarks.hub import served

LORA_GIB, GENERATE_MIB = 3.0324, 12_317
SNAPSHOT_MEGABYTES = 20

_MEM_TRACKER = """
import torch, transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
config = transformers.AutoConfig.from_pretrained("Qwen/Qwen3-0.6B")
with FakeTensorMode(), torch.device("cpu"):
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    ids = torch.zeros(1, 4096, dtype=torch.int64)
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            tracker.reset_mod_stats()
    peak = tracker.get_tracker_snapshot("peak")
print("bytes", sum(kinds["Total"] for kinds in peak.values()))
"""
_HF_MEM = """
import os, httpx2
get = httpx2.AsyncClient.get
async def here(self, url, **rest):
    return await get(self, url.replace("https://huggingface.co", os.environ["HF_ENDPOINT"]), **rest)
httpx2.AsyncClient.get = here
from hf_mem.cli import main
main()
"""


@dataclass(frozen=True)
class Tool:
    """A tool's process, and what of its output is the answer."""

    name: str
    words: str  # A module and its arguments, or with `code` arguments alone.
    bytes_of: Callable[[str], float | None] = lambda output: None  # The answer in bytes; None if it gives none.
    code: str = ""
    needs_peers: bool = False
    note: str = ""

    def arguments(self, places: dict[str, Path]) -> list[str]:
        """Python's, with places for their names in braces."""
        words = self.words.format_map(places).split()
        return ["-c", self.code, *words] if self.code else ["-m", *words]


@dataclass(frozen=True)
class Work:
    """What all of them are asked, and the bytes that were measured."""

    what: str
    tools: Sequence[Tool]
    measured: float | None = None


def _stage(name: str | None) -> Callable[[str], float]:
    """The peak of our answer, or the one of the stages that are called so."""

    def read(output: str) -> float:
        answer = json.loads(output)
        if name is None:
            return float(answer["peak"]["allocated_bytes"])
        return float(max(stage["peak_allocated_bytes"] for stage in answer["stages"] if name in stage["name"]))

    return read


def _mib(*keys: str) -> Callable[[str], float]:
    def read(output: str) -> float:
        return float(sum(json.loads(output)["memory_mib"][key] for key in keys)) * MIB

    return read


def _accelerate(column: int) -> Callable[[str], float]:
    """accelerate's table: of the line for float16, the column."""

    def read(output: str) -> float:
        line = next(line for line in output.splitlines() if "float16" in line)
        amount, unit = line.split("│")[column].split()
        return float(amount) * {"GB": GIB, "MB": MIB}[unit]

    return read


def _printed(output: str) -> float:
    found = re.search(r"^bytes (\d+)", output, re.MULTILINE)
    assert found is not None, output[-500:]
    return float(found[1])


def _fitcheck(output: str) -> float:
    memory = json.loads(output)["memory_mib"]
    return float(memory["total"] - memory["overhead"]) * MIB


_MEM_TRACKER_NAME = "FakeTensorMode + MemTracker"
_ACCELERATE, _ACCELERATE_NAME = "accelerate.commands.estimate Qwen/", "accelerate estimate-memory"
WORKS = {
    "lora": Work(
        "a step of LoRA, Qwen2.5-0.5B",
        [
            Tool(
                "memprof profile",
                "memprof profile --model qwen2.5-0.5b --context-length 1024 --adapter lora --lora-rank 16 "
                "--lora-targets q_proj,k_proj,v_proj,o_proj --optimizer paged-adamw-8bit "
                "--fix activation-checkpointing --steps 3 --gpu rtx-4080 --json",
                _stage(None),
            ),
            Tool(
                "fitcheck",
                "fitcheck Qwen/Qwen2.5-0.5B --lora-r 16 --lora-targets q,k,v,o --seq-len 1024 --optimizer adam8bit "
                "--grad-checkpoint --flash-attn --vram-mib 16376 --json",
                _fitcheck,
                needs_peers=True,
                note="without its overhead",
            ),
            Tool(
                _ACCELERATE_NAME,
                f"{_ACCELERATE}Qwen2.5-0.5B",
                _accelerate(4),
                note="training with Adam; it knows no adapters",
            ),
        ],
        LORA_GIB * GIB,
    ),
    "full": Work(
        "two steps of full fine-tuning, Qwen3-0.6B, 4,096 tokens",
        [
            Tool("memprof profile", "memprof profile --model qwen3-0.6b --context-length 4096 --json", _stage(None)),
            Tool(_MEM_TRACKER_NAME, "", _printed, code=_MEM_TRACKER, note="as on a CPU"),
            Tool(
                "fitcheck",
                "fitcheck Qwen/Qwen3-0.6B --no-lora --seq-len 4096 --flash-attn --gpu h100-80 --json",
                _fitcheck,
                needs_peers=True,
                note="without its overhead",
            ),
            Tool(
                _ACCELERATE_NAME, f"{_ACCELERATE}Qwen3-0.6B", _accelerate(4), note="training with Adam, no activations"
            ),
        ],
    ),
    "generate": Work(
        "32,768 tokens in the cache, Qwen3-4B",
        [
            Tool(
                "memprof profile",
                "memprof profile --model qwen3-4b --mode inference --context-length 30720 --new-tokens 2048 "
                "--sdpa-backend flash --steps 1 --gpu h20-96gb --json",
                _stage("decode"),
                note="while decoding",
            ),
            Tool(
                "hf-mem",
                "--model-id Qwen/Qwen3-4B --experimental --max-model-len 32768 --json-output",
                lambda output: float(json.loads(output)["total_memory"]),
                code=_HF_MEM,
                needs_peers=True,
                note="weights and cache",
            ),
            Tool(
                "fitcheck infer",
                "fitcheck infer Qwen/Qwen3-4B --precision bf16 --seq-len 32768 --vram-mib 97871 --json",
                _mib("weights", "kv_cache"),
                needs_peers=True,
                note="without its overhead",
            ),
            Tool(_ACCELERATE_NAME, f"{_ACCELERATE}Qwen3-4B", _accelerate(3), note="weights alone"),
        ],
        GENERATE_MIB * MIB,
    ),
    "snapshot": Work(
        f"a snapshot of {SNAPSHOT_MEGABYTES} MB",
        [
            Tool("memprof analyze", "memprof analyze {snapshot}"),
            Tool("memprof analyze --html", "memprof analyze {snapshot} --html {page}"),
            Tool("memory_viz segment_plot", "torch.cuda._memory_viz segment_plot {snapshot} -o {page}"),
            Tool("memory_viz trace_plot", "torch.cuda._memory_viz trace_plot {snapshot} -o {page}"),
        ],
    ),
}


@dataclass(frozen=True)
class Took:
    seconds: float
    processor_seconds: float
    peak_bytes: int
    output: str = field(repr=False)


_MEASURE = (
    "import json, resource, subprocess, sys, time\n"
    "begin = time.perf_counter()\n"
    "done = subprocess.run(sys.argv[1:], capture_output=True, text=True)\n"
    "seconds, used = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)\n"
    "processor = used.ru_utime + used.ru_stime\n"
    "print(json.dumps([seconds, processor, used.ru_maxrss, done.returncode, done.stdout, done.stderr]))"
)


def took(arguments: Sequence[str], environment: dict[str, str]) -> Took:
    """Run Python with the arguments; exit code 1 is fitcheck's, 3 our word for what does not fit."""
    measured = subprocess.run(
        [sys.executable, "-c", _MEASURE, sys.executable, *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    seconds, processor, kib, code, output, error = json.loads(measured.stdout)
    if code not in (0, 1, 3) or "Traceback (most recent" in error:
        raise SystemExit(f"{' '.join(arguments)[:200]} failed with {code}:\n{error[-2000:]}")
    return Took(seconds, processor, kib * 1024, output)


def compared(work: Work, peers: Path | None, repeat: int, environment: dict[str, str], folder: Path) -> None:
    print(work.what if work.measured is None else f"{work.what}: {work.measured / GIB:.3f} GiB measured")
    places = {"snapshot": folder / "snapshot.pickle", "page": folder / "page.html"}
    for tool in work.tools:
        if tool.needs_peers and peers is None:
            print(f"  {tool.name:28} not run: --peers names the folder that it is installed in")
            continue
        path = os.pathsep.join([str(ROOT), *([str(peers)] if tool.needs_peers else [])])
        arguments = tool.arguments(places)
        runs = [took(arguments, {**environment, "PYTHONPATH": path}) for _ in range(repeat)]
        seconds = statistics.median(run.seconds for run in runs)
        processor = statistics.median(run.processor_seconds for run in runs)
        peak = max(run.peak_bytes for run in runs)
        line = f"  {tool.name:28}{seconds:>8.2f} s{processor:>8.2f} s{peak / GIB:>7.2f} GiB"
        answer = tool.bytes_of(runs[-1].output)
        line += "" if answer is None else f"{answer / GIB:>9.3f} GiB"
        if answer is not None and work.measured is not None:
            line += f"{answer / work.measured - 1:>+9.2%}"
        print(f"{line}  {tool.note}".rstrip(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.peers")
    parser.add_argument("--peers", type=Path, help="where hf-mem and fitcheck-llm are installed")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", choices=WORKS, nargs="+", default=list(WORKS))
    options = parser.parse_args()
    peers = options.peers and options.peers.resolve()
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, median of {options.repeat}")
    print(f"  {'':28}{'seconds':>10}{'processor':>10}{'memory':>11}{'answer':>13}{'error':>9}")
    with tempfile.TemporaryDirectory() as name, served(["qwen2.5-0.5b", "qwen3-0.6b", "qwen3-4b"]) as hub:
        folder = Path(name)
        if "snapshot" in options.only:
            from tests.benchmarks.analyze import repeated, training

            with (folder / "snapshot.pickle").open("wb") as file:
                repeated(training(10), SNAPSHOT_MEGABYTES, file)
        environment = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(folder / "home"), "MEMPROF_CACHE": "off"}
        for work in options.only:
            compared(WORKS[work], peers, options.repeat, environment, folder)


if __name__ == "__main__":
    main()
