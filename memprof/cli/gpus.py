"""`memprof gpus`: the GPUs that can be simulated, and the GPUs of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from memprof.cli.output import ListOptions, print_json
from memprof.cli.streams import echo
from memprof.errors import UsageError
from memprof.units import gib

if TYPE_CHECKING:
    from memprof.device.catalog import Gpu
    from memprof.device.environment import Environment
    from memprof.device.gpus import NvmlGpu, NvmlSample

EXAMPLES = """
memprof gpus
memprof gpus --present
memprof gpus --json
"""


def gpus(
    output: ListOptions,
    present: Annotated[
        bool, typer.Option("--present", help="Instead the GPUs of this machine, and which of the catalog they are.")
    ] = False,
) -> None:
    """List the catalog's GPUs: name, capacity as CUDA reports it (GiB), compute capability."""
    if present:
        from memprof.device.environment import read_environment
        from memprof.device.nvml import read_gpus

        reading = read_gpus()
        environment = read_environment(reading)
        if output.as_json:
            from memprof.report.documents.command_results import PresentGpus

            names = tuple(found.key if (found := _find_catalog_gpu(gpu)) else None for gpu in reading.gpus)
            print_json(PresentGpus.from_sample(reading, names, environment))
        else:
            _print_local_gpus(reading, environment)
        return
    from memprof.device.catalog import list_gpus

    if output.as_json:
        from memprof.report.documents.command_results import GpuList

        print_json(GpuList(gpus=tuple(list_gpus())))
        return
    for gpu in list_gpus():
        major, minor = gpu.compute_capability
        echo(f"{gpu.key:<24}{gib(gpu.total_bytes):>8} GiB  sm_{major}{minor:<3} {gpu.name}")


def _print_local_gpus(reading: NvmlSample, environment: Environment) -> None:
    """Print NVML's values: driver, usable capacity of each GPU as in CUDA, and used memory."""
    if reading.gpus:
        cuda = f", CUDA {reading.cuda_version} at most" if reading.cuda_version else ""
        torch = f"; torch {environment.torch_version}" if environment.torch_version else ""
        echo(f"driver {environment.driver_version or 'not known'}{cuda}{torch}")
    for note in reading.notes:
        echo(note)
    for gpu in reading.gpus:
        echo(f"{gpu.index}  {gpu.name}: {_format_memory(gpu)}; {_format_gpu_option(gpu)}")
        for piece in gpu.slices:
            size = "memory not known" if piece.total_bytes is None else f"{gib(piece.total_bytes)} GiB"
            option = "" if piece.total_bytes is None else f"; --gpu-vram {gib(piece.total_bytes)}"
            echo(f"   slice {piece.index}  {piece.name}: {size}{option}")
        for note in gpu.notes:
            echo(f"   {note}")
    for note in environment.notes:
        echo(note)


def _format_memory(gpu: NvmlGpu) -> str:
    if gpu.usable_bytes is None or gpu.used_bytes is None:
        return "memory not known"
    return f"{gib(gpu.usable_bytes)} GiB, {gib(gpu.used_bytes)} used"


def _find_catalog_gpu(gpu: NvmlGpu) -> Gpu | None:
    from memprof.device.catalog import find_gpu

    try:
        return find_gpu(gpu.name)
    except UsageError:
        return None


def _format_gpu_option(gpu: NvmlGpu) -> str:
    found, total = _find_catalog_gpu(gpu), gpu.usable_bytes
    if found is None:
        return "not in the catalog" + ("" if total is None else f": --gpu-vram {gib(total)} has its size")
    return f"--gpu {found.key} ({gib(found.total_bytes)} GiB)"
