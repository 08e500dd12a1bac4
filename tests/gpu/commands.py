"""memprof's own commands on the GPU, each beside the same on the virtual one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from tests.gpu.settings import ROOT
from tests.gpu.task import Task, module, script

# memprof's exit codes (docs/cli.md).
FITS, FAILED, DOES_NOT_FIT, DIFFERS = 0, 1, 3, 4
_TINY = Path(__file__).with_name("tiny_llama.json")
_MODELS = {
    # On the CPU a model that trains in a second stands for both.
    "cpu": {
        "small": ["--model", _TINY, "--context-length", 32],
        "large": ["--model", _TINY, "--context-length", 32, "--batch-size", 2],
    },
    "cuda": {
        "small": ["--model", "gpt2", "--context-length", 256],
        "large": ["--model", "llama-3.2-1b", "--context-length", 1024],
    },
}


def tasks(device: str, gpu: str, scripts: Path) -> Iterator[Task]:
    """Yield the commands in order: later ones read the captures of earlier ones. They are measured on `device` and
    simulated on `gpu`."""
    for size, model in _MODELS[device].items():
        measured, simulated = f"{size}-measured.memprof", f"{size}-simulated.memprof"
        on_device, virtual = ["--device", device], ["--device", "virtual", "--gpu", gpu]
        yield _command(f"{size}-measured", "profile", "--debug", *model, *on_device, "--save", measured)
        yield _command(f"{size}-simulated", "profile", *model, *virtual, "--save", simulated)
        yield _comparison(f"{size}-compared", measured, simulated)
    model = _MODELS[device]["small"]
    yield _command("show-json", "show", "small-measured.memprof", "--json", limit=20)
    yield _command("auto", "profile", "--debug", *model)
    yield _command("detail", "profile", "--debug", *model, "--device", device, "--detail", "--json")
    on_cuda = ["run", "--debug", "--device", "cuda"]
    plain, measured, simulated = scripts / "plain.py", "script-measured.memprof", "script-simulated.memprof"
    yield _command("script-simulated", "run", "--gpu", gpu, "--save", simulated, plain)
    yield _command("script-measured", *on_cuda, "--save", measured, plain, needs_cuda=True)
    yield _comparison("script-compared", measured, simulated, needs_cuda=True)
    recording = scripts / "lstm.py"  # uses the allocator's history itself, as memprof does
    yield _command("recording-script-measured", *on_cuda, recording, needs_cuda=True)
    yield _command("verify", "verify", "--debug", "chunked-loss")
    watched = ["monitor", "--quiet", "--log", "monitor.csv", "--", *script(plain)]
    yield _command("monitor", *watched, needs_cuda=True)
    yield _command("out-of-memory", *on_cuda, scripts / "out_of_memory.py", needs_cuda=True, exit_codes=(DOES_NOT_FIT,))
    # Its third step is wrong, and a run is otherwise ended after the second.
    to_the_end = [*on_cuda, "--until-exit", scripts / "assertion.py"]
    yield _command("device-assertion", *to_the_end, needs_cuda=True, exit_codes=(FAILED,))
    too_large = ["profile", "--debug", "--model-size", "4B", "--context-length", 131_072, "--quiet"]
    yield _command("auto-too-large", *too_large, needs_cuda=True, exit_codes=(DOES_NOT_FIT,))
    # Without pyproject.toml, whose settings an older pytest may refuse.
    settings = ["-c", os.devnull, "--rootdir", ROOT, "--import-mode=importlib", "-p", "no:warnings"]
    options = ["-q", "-x", "-p", "no:cacheprovider", "-m", "gpu"]
    tests = module("pytest", *settings, *options, ROOT / "tests" / "recipes")
    yield Task("commands/gpu-tests", tests, needs=8, limit=60, needs_cuda=True, needs_package="pytest")


def _command(
    name: str, *arguments: object, limit: float = 60, needs_cuda: bool = False, exit_codes: tuple[int, ...] = (FITS,)
) -> Task:
    command = module("memprof", *arguments)
    return Task(f"commands/{name}", command, needs=8, limit=limit, needs_cuda=needs_cuda, exit_codes=exit_codes)


def _comparison(name: str, measured: str, simulated: str, needs_cuda: bool = False) -> Task:
    """Compare two captures; that they differ by more than they may is a result as well."""
    return _command(name, "compare", measured, simulated, limit=30, needs_cuda=needs_cuda, exit_codes=(FITS, DIFFERS))
