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
    """List the catalog's GPUs: name, capacity as torch reports it (GiB; or as derived), compute capability."""
    if present:
        from memprof.device.environment import read_environment
        from memprof.device.nvml import read_gpus

        sample = read_gpus()
        environment = read_environment(sample)
        if output.as_json:
            from memprof.report.documents.command_results import PresentGpus

            names = tuple(match.key if (match := _find_catalog_gpu(gpu)) else None for gpu in sample.gpus)
            print_json(PresentGpus.from_sample(sample, names, environment))
        else:
            _print_local_gpus(sample, environment)
        return
    from memprof.device.catalog import list_gpus

    if output.as_json:
        from memprof.report.documents.command_results import GpuList

        print_json(GpuList(gpus=tuple(list_gpus())))
        return
    for gpu in list_gpus():
        major, minor = gpu.compute_capability
        kind = f"sm_{major}{minor}" if gpu.device_type == "cuda" else gpu.device_type
        capacity = "" if gpu.capacity_kind == "reported" else f" ({gpu.capacity_kind} capacity)"
        echo(f"{gpu.key:<24}{gib(gpu.total_bytes):>8} GiB  {kind:<7}{gpu.name}{capacity}")


def _print_local_gpus(sample: NvmlSample, environment: Environment) -> None:
    """Print what NVML reports: the driver, and the usable and used memory of each GPU."""
    if sample.gpus:
        cuda = f", CUDA {sample.cuda_version} at most" if sample.cuda_version else ""
        torch = f"; torch {environment.torch_version}" if environment.torch_version else ""
        echo(f"driver {environment.driver_version or 'not known'}{cuda}{torch}")
    for note in sample.notes:
        echo(note)
    for gpu in sample.gpus:
        echo(f"{gpu.index}  {gpu.name}: {_format_memory(gpu)}; {_format_gpu_option(gpu)}")
        for mig_slice in gpu.slices:
            size = "memory not known" if mig_slice.total_bytes is None else f"{gib(mig_slice.total_bytes)} GiB"
            option = "" if mig_slice.total_bytes is None else f"; --gpu-vram {gib(mig_slice.total_bytes)}"
            echo(f"   slice {mig_slice.index}  {mig_slice.name}: {size}{option}")
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
    catalog_gpu, total_bytes = _find_catalog_gpu(gpu), gpu.usable_bytes
    if catalog_gpu is None:
        return "not in the catalog" + ("" if total_bytes is None else f": --gpu-vram {gib(total_bytes)} has its size")
    return f"--gpu {catalog_gpu.key} ({gib(catalog_gpu.total_bytes)} GiB)"
