"""The options that name a virtual card."""

from __future__ import annotations

import typer

from memprof.errors import UsageError


def check_one_card(context: typer.Context, gpu: str, gpu_vram: str | None) -> None:
    """Whether one card is named at most, where --gpu has a default, which is no name that was given.

    Raises:
        UsageError: both options are given.
    """
    source = context.get_parameter_source("gpu")
    if gpu_vram is not None and source is not None and source.name != "DEFAULT":
        raise UsageError(
            "give --gpu or --gpu-vram, not both", value=f"--gpu {gpu} --gpu-vram {gpu_vram}", hint="leave one out"
        )
