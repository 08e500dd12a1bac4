"""`RunSpec`, the options of `memprof run` in one frozen dataclass, as `TargetSpec` has those of `memprof profile`.

Every option that affects the result of a run is a field. Code that runs the script again, or prints the command, uses
the complete object, so that no option is lost. To add an option of `memprof run`, add a field.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from memprof.spec import option, repeat_option

# Environment variable: "off" if the settings file is not to be read, because its options are in the spec already.
SETTINGS_VARIABLE = "MEMPROF_SETTINGS"


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """Options of `memprof run`; memory sizes are in bytes."""

    worst_batch: bool = option(False, "Script", "Feed the largest batch of each data loader first.")
    beyond: bool = option(False, "Script", "Go on past a full GPU, to see the whole need: no error in the script.")
    no_compile: bool = option(False, "Script", "Run what the script gives to torch.compile eagerly.")
    no_stubs: bool = option(False, "Script", "Stand in for no package that is not installed (flash_attn).")
    steps: int | None = repeat_option(
        "steps", note="The script is stopped then.", unset="2; more while that is cheap, or memory grows"
    )
    until_exit: bool = option(False, "Stopping", "Let the script run to its own end.")
    timeout: float | None = option(None, "Stopping", "Stop after so long.", metavar="SECONDS")
    alloc_conf: str | None = repeat_option("alloc_conf")
    torch_release: str | None = repeat_option("torch_release")
    gpu: str = repeat_option("gpu")
    gpu_vram_bytes: int | None = repeat_option("gpu_vram_bytes")
    host_memory_bytes: int | None = repeat_option("host_memory_bytes")
    gpus: int | None = repeat_option(
        "gpus", default=None, unset="1, or as many as a launcher starts processes",
        note="cuda:0, cuda:1 and so on: for one process, or a rank on each.",
    )  # fmt: skip
    nodes: int | None = option(
        None, "GPU", "How many machines with so many GPUs.", is_count=True, unset="1, or the launcher's"
    )
    rank: int | None = repeat_option("rank", note="It alone is run, without --ranks.", unset="0")
    ranks: str | None = option(
        None, "GPU", "The ranks to run together, each in a process: all, or numbers.", metavar="all|0,3|0-3"
    )
    shown_gpu: int | None = option(
        None,
        "Output",
        "Of several GPUs, the one to show in full.",
        flag="--gpu-index",
        metavar="INDEX",
        unset="the GPU with the highest usage",
    )
    device: str = repeat_option("device")
    detail: bool = repeat_option("detail")
    fixes: tuple[str, ...] = ()  # NAME or NAME=VALUE, switched on in the script's models.

    def edit(self, **changes: Any) -> RunSpec:
        """Return a copy with some fields replaced."""
        return dataclasses.replace(self, **changes)
