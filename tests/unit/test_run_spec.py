"""The options of a script's run: their defaults, and their flags where these are not their names."""

from __future__ import annotations

import dataclasses

from memprof.run_spec import RunSpec
from memprof.spec import get_options


def test_defaults_are_a_run_on_one_virtual_gpu() -> None:
    assert dataclasses.asdict(RunSpec()) == {
        "worst_batch": False, "beyond": False, "no_compile": False, "no_stubs": False, "steps": None,
        "until_exit": False, "timeout": None, "alloc_conf": None, "torch_release": None,
        "gpu": "h100-80gb", "gpu_vram_bytes": None,
        "host_memory_bytes": None, "gpus": None, "nodes": None, "rank": None, "ranks": None, "shown_gpu": None,
        "device": "virtual", "detail": False, "fixes": (),
    }  # fmt: skip


def test_options_of_a_run() -> None:
    options = get_options(RunSpec)
    flags = {name: about.flag for name, about in options.items() if about.flag != f"--{name.replace('_', '-')}"}
    assert flags == {"gpu_vram_bytes": "--gpu-vram", "host_memory_bytes": "--host-memory", "shown_gpu": "--gpu-index"}
    assert {name for name, about in options.items() if about.is_count} == {"steps", "gpus", "nodes"}
    assert {about.panel for about in options.values()} == {"Script", "Training", "Stopping", "Memory", "GPU", "Output"}
    assert all(about.help.endswith(".") for about in options.values())
    # A GPU or a rank may be the first, and how many there are is at least one.
    assert [str(options[name].unset)[0] for name in ("steps", "gpus", "nodes", "rank")] == ["2", "1", "1", "0"]
    assert "--lengths" not in str(options["steps"].unset)  # an option of a profile


def test_an_edit_replaces_fields_of_a_copy() -> None:
    spec = RunSpec(gpus=2)
    assert spec.edit(gpus=4) == RunSpec(gpus=4) and spec.gpus == 2
