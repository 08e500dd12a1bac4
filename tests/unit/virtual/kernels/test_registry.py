"""Kernels register themselves: one file adds an operator, no entry is lost, and what is named exists."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import torch

import memprof
from memprof.device.catalog import find_gpu
from memprof.trace.events import EventKind
from memprof.virtual import VirtualGpu, kernels
from memprof.virtual.kernels import registry

# Added to torch after the oldest release that memprof runs on; older ones have a composite in their place.
OF_NEWER_RELEASES = {"_c10d_functional._wrap_tensor_autograd", "aten._fused_rms_norm", "aten._fused_rms_norm_backward"}

# What reads like one: a project, a class's attribute, a module of Python.
NO_FILES = {"llama.cpp", "org/llama.cpp", "nvml.h", "transformer.h", "codegen.cpp"}

TOY = '''
"""A family of one operator."""

import torch

from memprof.virtual.kernels.registry import kernel, scratch

_library = torch.library.Library("memprof_toy", "DEF")
_library.define("halved(Tensor data) -> Tensor")
_library.impl("halved", torch.empty_like, "Meta")
_library.define("sorted(Tensor data) -> Tensor")
_library.impl("sorted", torch.empty_like, "Meta")


@kernel("memprof_toy.halved")
def halved(launch):
    data = launch.args[0]
    with launch.scratch(4096):
        return launch.new(len(data) // 2, data.dtype)


@scratch("memprof_toy.sorted")
def sorted_scratch(args, GPU):
    return [2 * args[0].nbytes]
'''


# Of large host tensors and of those without values, which have no data either.
ON_HOST = (
    "native_dropout nonzero index index_put index_put_ _index_put_impl_ masked_fill masked_fill_ masked_select geqrf "
    "multi_margin_loss_backward multilabel_margin_loss_backward fractional_max_pool3d_backward _ctc_loss "
    "_ctc_loss_backward _grouped_mm add native_layer_norm_backward _empty_affine_quantized "
    "_empty_per_channel_affine_quantized quantize_per_tensor quantize_per_channel quantize_per_tensor_dynamic "
    "_cudnn_rnn_flatten_weight _pack_padded_sequence"
)


def test_kernels_of_operators_on_the_host_too():
    for name in ON_HOST.split():
        assert registry.host_kernels.get(getattr(torch.ops.aten, name))


def test_a_new_operator_is_one_new_file(tmp_path, monkeypatch):
    (tmp_path / "toy_family.py").write_text(textwrap.dedent(TOY))
    monkeypatch.setattr(kernels, "__path__", [*kernels.__path__, str(tmp_path)])
    registry.import_kernels()
    with VirtualGpu(find_gpu("a100-80gb"), workspaces=False) as gpu:
        data = torch.empty(1024, device="cuda")
        half = torch.ops.memprof_toy.halved(data)
        whole = torch.ops.memprof_toy.sorted(data)
        assert half.shape == (512,)
        assert whole.shape == (1024,)
    trace = gpu.trace
    made = [(storage.num_bytes, trace.op(storage), storage.hidden) for storage in trace.storages]
    assert made == [
        (4096, "aten.empty", False),
        (4096, "memprof_toy.halved", True),
        (2048, "memprof_toy.halved", False),
        (4096, "memprof_toy.sorted", False),
        (8192, "memprof_toy.sorted", True),
    ]
    order = [tuple(event) for event in trace.events]
    assert order.index((EventKind.FREE, 1)) > order.index((EventKind.ALLOC, 2))


def test_a_second_registration_names_both_functions():
    table = registry.OperatorTable("scratch formula")

    @table(torch.ops.aten.mm)
    def one(args, gpu):
        return []

    with pytest.raises(ValueError, match=r"aten\.mm has two entries as scratch formula: .*one and .*other"):

        @table(torch.ops.aten.mm)
        def other(args, gpu):
            return []

    assert table.get(torch.ops.aten.mm) is one


def test_a_real_table_refuses_a_second_entry():
    with pytest.raises(ValueError, match=r"aten\.topk has two entries as scratch formula"):
        registry.scratch(torch.ops.aten.topk)(lambda args, gpu: [])
    with pytest.raises(ValueError, match=r"aten\.convolution has two entries as kernel"):
        registry.kernel("aten.convolution")(lambda launch: None)


def test_what_is_named_by_a_string_exists_or_is_of_another_release():
    absent = {name for name in registry.MISSING_OPERATORS if name.startswith(("aten.", "_c10d_functional."))}
    assert absent <= OF_NEWER_RELEASES, "a misspelt operator, or one that this release of torch does not have"


def test_sources_name_files_of_the_release():
    """All that memprof names was seen in the release, and the headers lie in its wheel, of which one can be here."""
    listed = {}
    for line in (Path(__file__).parent / f"sources_of_{registry.SOURCE_TAG}.txt").read_text().splitlines():
        if line.startswith("["):
            where = line[1:].partition(":")[0]
        elif line and not line.startswith("#"):
            listed[line] = where
    files = Path(memprof.__file__).parent.rglob("*.py")
    # A stub names files of the package that it stands for, and what is about engines those of the engines, with its
    # release.
    text = "".join(
        file.read_text()
        for file in files
        if not {"stubs", "stubs.py", "engines", "engine_starts.py", "serving"} & {*file.parts}
    ).replace("aten/src/", "")
    named = set(re.findall(r"(?<![\w*])[\w/]+\.(?:cuh|cu|cpp|h)\b", text)) - NO_FILES
    assert not {name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in listed)}
    if not registry.SOURCE_TAG.startswith(f"v{torch.__version__.partition('+')[0]}"):
        pytest.skip(f"this torch is not {registry.SOURCE_TAG}")
    include = Path(torch.__file__).parent / "include"
    headers = [f"/{path.relative_to(include)}" for path in include.rglob("*") if path.suffix in (".h", ".cuh")]
    found = {name for name in listed if any(header.endswith(f"/{name}") for header in headers)}
    assert found == {name for name, where in listed.items() if where == "include"}
