"""nanotron's published grid beside its own program on virtual GPUs: the table of docs/accuracy-tables.md.

    python -m tests.benchmarks.nanotron --fetched FOLDER [--only TEXT] [--keep FILE] [--write]

Llamas of 1B parameters on eight H100, with ZeRO-1: what the program itself prints of torch.cuda between its steps. The
figures are those of shared/published_parallel.csv beside the checkout. FOLDER has nanotron (commit 9dde9402) and
bench_cluster (421b670, which made the configurations) under their names. Runs have --keep's answers, and are added.

A run has three steps of four micro-batches, where the measured ones have 32 to 512: each keeps two numbers of 512 bytes
until the step ends. Without pipeline stages rank 0 runs alone; with them all ranks run.

Exit codes: 0; 4 there is no table.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import runpy
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.programs import data
from tests.programs.other_kernels import OLD_TRANSFORMERS, tiny_llama
from tests.programs.program import ROOT, Program, run

TABLE = ROOT.parent / "shared" / "published_parallel.csv"
PAGE = ROOT / "docs" / "accuracy-tables.md"
MARKS = "<!-- nanotron: python -m tests.benchmarks.nanotron --write -->\n", "<!-- end of nanotron -->\n"
FIGURES = {
    "steady": "in use between steps",
    "fbpeak": "peak of forward and backward",
    "optpeak": "peak of the optimizer's step",
    "reserved": "reserved",
}
_ID = re.compile(r"nanotron-8g-dp(\d)tp(\d)pp(\d)mb(\d+)-(\w+)")
_LOGGED = re.compile(
    r"DP=0\|PP=0\|TP=0[^\n]*?Memory usage: ([\d.]+)MiB\. Peak allocated ([\d.]+)MiB\. Peak reserved: ([\d.]+)MiB"
)
_ENVIRONMENT = """
import os

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # as the sources' own job has it
"""
NOT_HERE = 4


class Run(NamedTuple):
    data: int
    tensor: int
    pipeline: int
    micro_batch: int

    @property
    def name(self) -> str:
        """As the source's folders have it."""
        return "dp{}-tp{}-pp{}-mbz{}".format(*self)

    def found(self, fetched: Path) -> dict[str, float] | str:
        """Its figures in MiB, by the names of FIGURES; or why there are none."""
        program = Program(
            name=self.name,
            repository="huggingface/nanotron",
            commit="9dde940",
            command="torchrun --nproc-per-node 8 run_train.py --config-file config.yaml",
            before=_ENVIRONMENT + OLD_TRANSFORMERS,
            data=lambda home: self._prepare(home, fetched / "bench_cluster"),
            options="--gpu h100-80gb --steps 3" + (" --ranks all" if self.pipeline > 1 else ""),
            path=("src",),
            seconds=3600,
        )
        result = run(program, fetched)
        logged = [tuple(map(float, line)) for line in _LOGGED.findall(result.stderr)]
        if result.exit_code or len(logged) != 6:
            return (result.stderr.strip() or "it said nothing").splitlines()[-1]
        (steady, optimizer, _), (_, peak, reserved) = logged[4:]
        return {"steady": steady, "fbpeak": peak, "optpeak": optimizer, "reserved": reserved}

    def _prepare(self, home: Path, configurations: Path) -> None:
        import yaml

        tiny_llama(home)
        texts = [{"text": data.words(20_000, seed)} for seed in range(180)]
        data.write(home / "texts" / "train.jsonl", "".join(json.dumps(row) + "\n" for row in texts))
        said = runpy.run_path(str(configurations / "bench_cluster" / "template" / "base_config.py"))["base_config"]
        said["model"]["model_config"] |= {  # create_configs.py, llama-1B
            "hidden_size": 2048, "intermediate_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 24,
            "num_key_value_heads": 32, "max_position_embeddings": 4096, "vocab_size": 50_257,
        }  # fmt: skip
        said["parallelism"] |= {"dp": self.data, "tp": self.tensor, "pp": self.pipeline}
        batches = max(4, 2 * self.pipeline)
        said["tokens"] |= {
            "batch_accumulation_per_replica": batches, "micro_batch_size": self.micro_batch, "train_steps": 4,
        }  # fmt: skip
        said["data_stages"][0]["data"]["dataset"] |= {
            "hf_dataset_or_datasets": "texts", "dataset_processing_num_proc_per_process": 1,
        }  # fmt: skip
        said["tokenizer"]["tokenizer_name_or_path"] = "model"
        said["profiler"] = None  # the sources' traced the GPU
        said["general"]["run"] = self.name
        said["checkpoints"]["checkpoints_path"] = "checkpoints"
        data.write(home / "config.yaml", yaml.safe_dump(said))


def published() -> dict[Run, dict[str, float]]:
    """The rows of the table in MiB, by configuration."""
    found: dict[Run, dict[str, float]] = {}
    with TABLE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if match := _ID.fullmatch(row["id"]):
                found.setdefault(Run(*map(int, match.groups()[:4])), {})[match[5]] = float(row["value"])
    return found


def table(rows: Mapping[Run, Mapping[str, float]], answers: Mapping[str, dict[str, float] | str]) -> str:
    """Published, simulated and signed errors, and what is not predicted."""
    lines = ["| run | what | published, MiB | simulated | signed error |", "|---|---|---:|---:|---:|"]
    errors, missing = [], []
    for one, figures in sorted(rows.items(), key=lambda item: (item[0].pipeline, item[0])):
        answer = answers.get(one.name, "not run")
        if isinstance(answer, str):
            missing.append(f"* {one.name}, {len(figures)} rows: {answer}")
            continue
        for name, value in figures.items():
            errors.append((answer[name] - value) / value)
            shown = f"{answer[name]:,.2f} | {errors[-1]:+.2%}"
            lines.append(f"| {one.name} | {FIGURES[name]} | {value:,.2f} | {shown} |")
    number = sum(map(len, rows.values()))
    within = sum(abs(error) <= 0.01 for error in errors)
    summary = (
        f"{len(errors)} of {number} rows are predicted: median absolute error "
        f"{statistics.median(map(abs, errors)):.2%}, {within} within 1%, from {min(errors):+.2%} to {max(errors):+.2%}."
        if errors
        else f"None of {number} rows is predicted."
    )
    return "\n".join([summary, "", *lines, "", *missing]).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fetched", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--keep", type=Path, default=Path("nanotron-results.json"))
    parser.add_argument("--write", action="store_true")
    told = parser.parse_args()
    if not TABLE.is_file():
        print(f"no {TABLE}", file=sys.stderr)
        return NOT_HERE
    rows = published()
    answers = json.loads(told.keep.read_text(encoding="utf-8")) if told.keep.exists() else {}
    for one in rows:
        if told.only in one.name and one.name not in answers:
            answers[one.name] = one.found(told.fetched)
            told.keep.write_text(json.dumps(answers), encoding="utf-8")
            print(one.name, answers[one.name], flush=True)
    text = table(rows, answers)
    if told.write:
        before, rest = PAGE.read_text(encoding="utf-8").split(MARKS[0])
        PAGE.write_text(before + MARKS[0] + text + MARKS[1] + rest.split(MARKS[1])[1], encoding="utf-8")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
