"""How many of transformers' architectures complete a training step on the virtual GPU.

    python -m tests.benchmarks.architectures [--only NAME] [--task TASK] [--write docs/architectures.md]

For every model class of six of transformers' auto mappings: a tiny configuration is looked for with which one training
step (forward with labels, backward, AdamW) really runs on the CPU; then the same step runs on the virtual GPU. Each
architecture runs in a process of its own, so that a crash of one does not end the sweep. Exit code 1 if the rate is
below the bar. `ARCHITECTURES_PARTS` in the environment is how many run at once (2).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import importlib
import multiprocessing
import multiprocessing.connection
import os
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from memprof.device.catalog import find_gpu
from memprof.virtual import VirtualGpu
from memprof.workload.loss import _collect_tensors
from tests.benchmarks.tiny_models import Case, batches, configurations

BAR = 0.98
CPU_SECONDS, VIRTUAL_SECONDS = 40, 40
MAX_PARAMETERS = 150_000_000
MAX_HOST_BYTES = 8 << 30

TASKS = {
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq-lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image-classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "speech-seq2seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "ctc": "MODEL_FOR_CTC_MAPPING_NAMES",
}


@dataclass
class Outcome:
    """What became of a case: `cpu` and `virtual` are "ok" or the reason why not; "" if it was not reached."""

    case: Case
    cpu: str = ""
    virtual: str = ""
    trace: str = ""
    mismatches: int = 0
    seconds: float = 0.0


def cases(task: str | None, only: str | None) -> list[Case]:
    """Every model class of the auto mappings."""
    found = []
    for name, mapping in TASKS.items():
        if task in (None, name):
            for model_type, classes in getattr(modeling_auto, mapping).items():
                class_names = (classes,) if isinstance(classes, str) else classes
                found += [Case(name, model_type, class_name) for class_name in class_names]
    return [case for case in found if only in (None, case.model_type, case.class_name)]


# -- one step ---------------------------------------------------------------------------------------------------------


def _model(case: Case, config: Any) -> nn.Module:
    model_class = getattr(transformers, case.class_name)
    if model_class.config_class is not type(config):
        # As the auto classes do: a text model takes the text part of a larger model's configuration.
        for name, part in getattr(type(config), "sub_configs", {}).items():
            if part is model_class.config_class:
                config = getattr(config, name)
    model = model_class._from_config(copy.deepcopy(config), dtype=torch.float32)
    if getattr(model.config, "use_cache", False):
        model.config.use_cache = False
    return model.train()  # type: ignore[no-any-return]


def _loss(outputs: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The model's own loss, or a mean of what it returns (the auto mappings name models that return none)."""
    loss = outputs.get("loss") if isinstance(outputs, dict) else None
    if isinstance(loss, torch.Tensor):
        return loss.sum()
    return next(t for t in _collect_tensors(outputs) if t.is_floating_point() and t.requires_grad).mean()


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    _loss(model(**batch), batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def on_cpu(case: Case) -> tuple[str, Any, dict[str, torch.Tensor] | None]:
    """The first tiny configuration and batch with which the step really runs: "ok", or why there is none."""
    reason = ""
    deadline = time.perf_counter() + CPU_SECONDS * 0.8
    try:
        found = configurations(case)
        for _, config in found:
            try:
                with torch.device("meta"):
                    size = sum(p.numel() for p in _model(case, config).parameters())
            except Exception:
                size = 0
            if size > MAX_PARAMETERS:
                reason = reason or f"no tiny configuration: {size:,} parameters"
                continue
            try:
                model = _model(case, config)
                for batch in batches(case, model):
                    try:
                        step(model, batch)
                        return "ok", config, batch
                    except Exception as error:
                        reason = reason or _reason(error)
                        model.zero_grad()
                    if time.perf_counter() > deadline:
                        break
            except Exception as error:
                reason = reason or _reason(error)
            if time.perf_counter() > deadline:
                break
    except Exception as error:
        return f"no configuration: {_reason(error)}", None, None
    return reason or "no configuration", None, None


def on_virtual_gpu(case: Case, config: Any, batch: dict[str, torch.Tensor]) -> int:
    """The same step on the virtual GPU. Returns the number of device mismatches that it reports."""
    with VirtualGpu(find_gpu("a100-80gb")) as gpu:
        with torch.device("cuda"):
            model = _model(case, config)
        gpu.adopt(model)
        step(model, {name: tensor.to("cuda") for name, tensor in batch.items()})
    if gpu.trace.mismatches and os.environ.get("ARCHITECTURES_VERBOSE"):
        for mismatch in gpu.trace.mismatches[:4]:
            print(case, gpu.trace.ops[mismatch.op], mismatch.operands, file=sys.stderr)
    return len(gpu.trace.mismatches)


def _child(case: Case, pipe: Any) -> None:
    """What runs in a case's own process: tells its state as it goes."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_HOST_BYTES, MAX_HOST_BYTES))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if not os.environ.get("ARCHITECTURES_VERBOSE"):
        os.dup2(1, 2)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    reason, config, batch = on_cpu(case)
    pipe.send(("cpu", reason))
    if batch is None:
        return
    try:
        pipe.send(("virtual", "ok", "", on_virtual_gpu(case, config, batch)))
    except BaseException as error:
        pipe.send(("virtual", _reason(error), traceback.format_exc(), 0))


# -- the sweep --------------------------------------------------------------------------------------------------------


class _Running:
    def __init__(self, case: Case) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe(duplex=False)
        self.outcome = Outcome(case)
        self.begin = time.perf_counter()
        self.limit = self.begin + CPU_SECONDS
        self.process = context.Process(target=_child, args=(case, theirs))
        self.process.start()
        theirs.close()

    def finished(self) -> bool:
        """Take what it has told; whether it is over (ended, crashed or out of time)."""
        try:
            while self.pipe.poll():
                kind, reason, *rest = self.pipe.recv()
                if kind == "cpu":
                    self.outcome.cpu = reason
                    self.limit = time.perf_counter() + VIRTUAL_SECONDS
                else:
                    self.outcome.virtual, self.outcome.trace, self.outcome.mismatches = reason, *rest
        except EOFError:
            self.process.join()
            self._end(f"the process ended with {self.process.exitcode}")
            return True
        if time.perf_counter() > self.limit:
            self.process.kill()
            self.process.join()
            self._end("took too long")
            return True
        return False

    def _end(self, reason: str) -> None:
        self.outcome.seconds = time.perf_counter() - self.begin
        self.pipe.close()
        if not self.outcome.cpu:
            self.outcome.cpu = reason
        elif self.outcome.cpu == "ok" and not self.outcome.virtual:
            self.outcome.virtual = reason


def sweep(todo: list[Case]) -> Iterator[Outcome]:
    """Run every case, a few at a time."""
    at_once = int(os.environ.get("ARCHITECTURES_PARTS", "2"))
    waiting = collections.deque(todo)
    running: list[_Running] = []
    while waiting or running:
        while waiting and len(running) < at_once:
            case = waiting.popleft()
            # Imported here, so that the processes share it.
            with contextlib.suppress(Exception):
                getattr(transformers, case.class_name)
                importlib.import_module(CONFIG_MAPPING[case.model_type].__module__)
            running.append(_Running(case))
        multiprocessing.connection.wait([each.pipe for each in running], timeout=0.5)
        for each in list(running):
            if each.finished():
                running.remove(each)
                yield each.outcome


# -- the report -------------------------------------------------------------------------------------------------------


def report(outcomes: list[Outcome]) -> str:
    lines = [
        "# Architectures of transformers",
        "",
        "Generated by `python -m tests.benchmarks.architectures --write docs/architectures.md` with "
        f"torch {torch.__version__.split('+')[0]} and transformers {transformers.__version__}. Do not edit.",
        "",
        "Every model class of six of transformers' auto mappings runs one training step (forward with labels,",
        "backward, AdamW) in a tiny configuration, first on the CPU and then on the virtual GPU. An architecture",
        "counts if the step runs on the CPU, and is completed if it runs to its end on the virtual GPU. This test",
        "compares no memory: see [accuracy](accuracy.md).",
        "",
        "| task | tried | trained on the CPU | completed on the virtual GPU | rate |",
        "|---|---:|---:|---:|---:|",
    ]
    for task in [*TASKS, None]:
        mine = [each for each in outcomes if task in (None, each.case.task)]
        trained = [each for each in mine if each.cpu == "ok"]
        if mine:
            done = sum(each.virtual == "ok" for each in trained)
            rate = f"{done / len(trained):.1%}" if trained else "-"
            name = task or "**all**"
            lines.append(f"| {name} | {len(mine)} | {len(trained)} | {done} | {rate} |")
    failed = [each for each in outcomes if each.cpu == "ok" and each.virtual != "ok"]
    lines += ["", "## Failures on the virtual GPU", ""]
    if failed:
        lines += ["| task | model | reason |", "|---|---|---|"]
        lines += [f"| {e.case.task} | {e.case.class_name} | {_cell(e.virtual)} |" for e in failed]
    else:
        lines.append("None.")
    reported = [each for each in outcomes if each.virtual == "ok" and each.mismatches]
    lines += [
        "",
        "## Completed, with reported device mismatches",
        "",
        'On a real GPU, these models raise an error if they are only constructed under `torch.device("cuda")`:',
        "constructors such as `torch.Tensor(size)` ignore it and leave a parameter on the host. memprof reports the",
        "mismatch and continues.",
        "",
    ]
    if reported:
        lines += ["| task | model | mismatches |", "|---|---|---:|"]
        lines += [f"| {e.case.task} | {e.case.class_name} | {e.mismatches} |" for e in reported]
    else:
        lines.append("None.")
    skipped = [each for each in outcomes if each.cpu != "ok"]
    lines += ["", "## Not counted: no tiny configuration trains on the CPU", ""]
    if skipped:
        lines += ["| task | model | reason |", "|---|---|---|"]
        lines += [f"| {e.case.task} | {e.case.class_name} | {_cell(e.cpu)} |" for e in skipped]
    else:
        lines.append("None.")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return "`" + text.replace("|", "\\|").replace("`", "'") + "`"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="transformers' architectures on the virtual GPU.")
    parser.add_argument("--only", help="just this model type or class")
    parser.add_argument("--task", choices=TASKS, help="just this task")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table to FILE")
    parser.add_argument("--traces", action="store_true", help="print the traceback of every failure")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    todo = cases(options.task, options.only)
    if not todo:
        parser.error("no such architecture")
    begin = time.perf_counter()
    outcomes: list[Outcome] = []
    for outcome in sweep(todo):
        outcomes.append(outcome)
        state = f"cpu: {outcome.cpu}" if outcome.cpu != "ok" else outcome.virtual
        if outcome.mismatches:
            state += f" ({outcome.mismatches} device mismatches)"
        case = outcome.case
        print(f"{len(outcomes):3}/{len(todo)} {case.task:20} {case.class_name:45} {outcome.seconds:5.1f}s {state}",
              flush=True)  # fmt: skip
        if options.traces and outcome.trace:
            print(outcome.trace, flush=True)
    outcomes.sort(key=lambda each: todo.index(each.case))
    text = report(outcomes)
    print()
    print("\n".join(line for line in text.splitlines()[9:18]))
    groups: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.cpu == "ok" and outcome.virtual != "ok":
            groups.setdefault(outcome.virtual, []).append(outcome.case.class_name)
    for reason, names in sorted(groups.items(), key=lambda item: -len(item[1])):
        print(f"{len(names):3} {reason}: {', '.join(names)}")
    print(f"{time.perf_counter() - begin:.0f} s")
    if options.write is not None:
        options.write.write_text(text)
    trained = [each for each in outcomes if each.cpu == "ok"]
    return 0 if trained and sum(each.virtual == "ok" for each in trained) >= BAR * len(trained) else 1


if __name__ == "__main__":
    sys.exit(main())
