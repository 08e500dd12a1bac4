"""The steps of the day: which programs each of them starts, how long they may take, and what they need."""

from __future__ import annotations

from collections.abc import Callable

from tests.gpu import commands as memprof_commands
from tests.gpu import library_table
from tests.gpu.day import Day
from tests.gpu.questions.context import KINDS
from tests.gpu.settings import ROOT
from tests.gpu.task import Task, module, script

SCRIPTS = ROOT / "tests" / "gpu" / "scripts"
TRAINING_SCRIPTS = (
    "llama", "gpt2_amp", "convnet", "checkpointing", "generate", "convnet_channels_last", "lstm", "compiled",
)  # fmt: skip
# One of each family: the sizes are those of GPUs, and a CPU would take minutes for all.
OPERATORS_ON_CPU = ("mm float32", "layer_norm float32", "sort", "linalg.inv", "AdamW", "unfold")
# What truth leaves to the steps that come after it.
_SECONDS_OF_LATER_STEPS = {"operators": 100, "scripts": 60, "opinfo": 40}


def questions(day: Day) -> None:
    """Answer what docs/limitations.md leaves open, side by side: NVML counts each process by itself."""
    commands = {f"context-{kind}": module("tests.gpu.questions.context", kind) for kind in KINDS}
    for pause in (0, 0.5):
        commands[f"ddp-buckets-{pause}"] = module("tests.gpu.questions.ddp_buckets", pause)
    commands["frames"] = module("tests.gpu.questions.frames")
    _side_by_side(day, "probe", commands, limit=100)


def libraries(day: Day) -> None:
    """Record the memory of operators over many shapes, a process for each of CUDA's libraries."""
    commands = {
        name: module("tests.gpu.operators", "cuda", "--family", name, "--out", f"{name}.jsonl")
        for name in (family.__name__ for family in library_table.FAMILIES)
    }
    _side_by_side(day, "operators", commands, limit=240)


def _side_by_side(day: Day, folder: str, commands: dict[str, list[str]], *, limit: float) -> None:
    tasks = [Task(f"{folder}/{name}", command, 30, limit, needs_cuda=True) for name, command in commands.items()]
    for started in [day.start(task) for task in tasks]:
        if started is not None:
            day.wait(started)


def probe(day: Day) -> None:
    """Measure what is on the GPU outside torch's allocator, and what torch's profiler costs."""
    for loading in ("lazy", "eager"):
        day.run(
            Task(
                f"probe/{loading}",
                module("tests.gpu.probe", "--device", day.settings.device, "--out", f"{loading}.json"),
                needs=20,
                limit=50,
                needs_cuda=loading == "eager",
                environment={"CUDA_MODULE_LOADING": loading.upper()},
            )
        )
    cost = module("tests.gpu.profiler_cost", "--device", day.settings.device, "--out", "profiler-cost.json")
    day.run(Task("probe/profiler-cost", cost, needs=20, limit=45))


def kineto(day: Day) -> None:
    """Compare what torch's profiler and memprof see with the allocator's own history."""

    def program(name: str, *patterns: str, needs_cuda: bool = True, alloc_conf: str = "") -> Task:
        arguments = ["--device", day.settings.device, "--out", f"{name}.json", *patterns]
        environment = {"PYTORCH_CUDA_ALLOC_CONF": alloc_conf} if alloc_conf else {}
        command = module("tests.gpu.kineto", *arguments)
        return Task(f"kineto/{name}", command, needs=20, limit=40, needs_cuda=needs_cuda, environment=environment)

    day.run(
        program("plain", "training", "inference", "ctx_attribute", "other_thread", "checkpointed", needs_cuda=False)
    )
    day.run(program("streams", "side_stream"))
    day.run(program("graphs", "captured_forward", "captured_step"))
    day.run(program("expandable-segments", "training", alloc_conf="expandable_segments:True"))
    day.run(program("cuda-malloc-async", "training", alloc_conf="backend:cudaMallocAsync"))


def commands(day: Day) -> None:
    """Run memprof's own commands on the GPU, and the same on the virtual one."""
    for task in memprof_commands.tasks(day.settings.device, day.gpu, SCRIPTS):
        day.run(task)
        day.pack()  # each is a result by itself


def truth(day: Day) -> None:
    """Record the truth cases, and compare them with their simulation, which goes on beside the next steps."""
    later = sum(seconds for name, seconds in _SECONDS_OF_LATER_STEPS.items() if name in day.settings.steps)
    seconds = max(0, int(day.budget.left() - later))
    record = module("tests.accuracy.truth", "--seconds", seconds, "--out", "recorded", "--quiet")
    needs = 30 + later
    day.run(Task("truth/record", record, needs=needs, limit=seconds + 10, needs_cuda=True, exit_codes=(0, 1)))
    compare = module("tests.accuracy.truth", "--out", "recorded", "--compare")
    day.start(Task("truth/compare", compare, needs=30, limit=150, needs_cuda=True, hides_gpu=True))


def operators(day: Day) -> None:
    """Record what each operator requests on the GPU, on the virtual one, and on that beside a real one; compare."""

    def program(name: str, where: str, *, needs_cuda: bool = False, hides_gpu: bool = False) -> Task:
        only = ["--only", *OPERATORS_ON_CPU] if day.settings.device == "cpu" else []
        command = module("tests.gpu.operators", where, "--out", f"{name}.jsonl", "--gpu", day.gpu, *only)
        return Task(f"operators/{name}", command, needs=20, limit=90, needs_cuda=needs_cuda, hides_gpu=hides_gpu)

    alone = day.start(program("virtual", "virtual", hides_gpu=True))
    day.run(program("real", day.settings.device))
    if alone is not None:
        day.wait(alone)
    day.run(program("virtual-beside-real", "virtual", needs_cuda=True))
    compare = module("tests.gpu.compare_operators", "real.jsonl", "virtual.jsonl", "virtual-beside-real.jsonl")
    day.run(Task("operators/compare", compare, needs=5, limit=20))


def scripts(day: Day) -> None:
    """Record training scripts with stacks, and compare each with the same script on the virtual GPU."""
    comparisons = []
    for name in TRAINING_SCRIPTS:
        path = SCRIPTS / f"{name}.py"
        if not day.run(Task(f"scripts/{name}", script(path), needs=15, limit=45, needs_cuda=True)):
            continue
        options = [f"{name}.pickle", "--gpu", day.gpu, "--path", SCRIPTS, "--cwd", "."]
        compare = module("tests.benchmarks.recordings", *options, "--", path)
        # Exit code 1: the simulation is not as close as it should be, which is a result.
        task = Task(f"scripts/{name}-compared", compare, needs=15, limit=60, hides_gpu=True, exit_codes=(0, 1))
        comparisons.append(day.start(task))
    day.run(Task("scripts/tracker", script(SCRIPTS / "tracker.py"), needs=15, limit=45, needs_cuda=True))
    for started in comparisons:
        if started is not None:
            day.wait(started)


def opinfo(day: Day) -> None:
    """Compare the operators of torch's own database, as many as the time allows."""
    wanted = 120 if day.settings.device == "cuda" else 20
    seconds = max(0, min(wanted, int(day.budget.left() - 25)))
    arguments = ["--device", day.settings.device, "--gpu", day.gpu, "--seconds", seconds, "--out", "opinfo.jsonl"]
    command = module("tests.gpu.opinfo", *arguments)
    day.run(Task("operators/opinfo", command, needs=45, limit=seconds + 25, needs_package="expecttest"))


RUN: dict[str, Callable[[Day], None]] = {
    "probe": probe,
    "kineto": kineto,
    "commands": commands,
    "truth": truth,
    "operators": operators,
    "scripts": scripts,
    "opinfo": opinfo,
    "questions": questions,
    "libraries": libraries,
}
