"""Both sides of the comparison of whole scripts with the CPU: run there for real, and on the virtual GPU.

    python -m tests.accuracy.script_events RESULT

The scripts are those of tests/scripts/programs, unmodified. On the CPU, what they ask of "cuda" is asked of it: a move
to the GPU is a copy, optimizers choose as for the GPU. Each side of each script is a process of its own, forked after
the libraries were imported, which takes most of the time.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import pickle
import sys
import tempfile
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.accuracy.cpu_events import Call, Change, call_of

PROGRAMS = Path(__file__).resolve().parents[1] / "scripts" / "programs"
# Script with what is tried -> what makes the CPU run CUDA's operators: float32, eager attention, no dropout.
SCRIPTS: dict[str, tuple[str, ...]] = {
    "char_gpt": ("--flash=False", "--dropout=0.0", "--dtype=float32", "--compile=False"),
    "trainer": ("--attn", "eager", "--precision", "fp32"),
    "trainer --gradient_checkpointing": ("--attn", "eager", "--precision", "fp32"),
    "seq2seq": ("--attn", "eager", "--dropout", "0"),
    "lora": ("--attn", "eager", "--precision", "fp32", "--dropout", "0"),
    "accelerate_loop": ("--attn", "eager", "--mixed_precision", "no", "--dropout", "0"),
    "images": ("--workers", "0", "--ema"),
    "generate": ("--attn", "eager", "--dtype", "float32"),
    "generate --way loop": ("--attn", "eager", "--dtype", "float32"),
    "mistakes": ("--attn", "eager", "--keep", "losses,logits"),
}
TO_GPU = "to the GPU"  # The operator of what a move to the GPU allocates.
_HOST = "on the host"


def _arguments(name: str) -> tuple[str, list[str]]:
    script, *tried = name.split()
    return str(PROGRAMS / f"{script}.py"), [*tried, *SCRIPTS[name]]


def virtual(name: str) -> dict[str, Any]:
    """The changes on the virtual GPU, and the sizes of what the host held meanwhile."""
    from memprof.device.catalog import find_gpu
    from memprof.script import Program, StopRule
    from memprof.script.capture import capture_script
    from memprof.trace.events import GPU, EventKind
    from memprof.virtual import VirtualGpu
    from tests.accuracy.cpu_temporaries import is_shared

    script, arguments = _arguments(name)
    gpu = VirtualGpu(find_gpu("a100-80gb"), workspaces=False, skips_kernels=True)
    trace, outcome = capture_script(Program(script, tuple(arguments)), gpu, StopRule(None))
    if outcome.exit_code:
        raise RuntimeError(f"the script failed on the virtual GPU: {outcome.error!r}")
    changes: list[Change] = []
    blocks: dict[int, int] = {}
    visible = ""
    for event in trace.events:
        if event.kind not in (EventKind.ALLOC, EventKind.FREE):
            continue
        storage = trace.storages[event.ref]
        free = event.kind is EventKind.FREE
        if storage.device != GPU or (free and event.ref not in blocks):
            continue
        if not free and storage.hidden and not is_shared(trace.op(storage), visible):
            continue
        if not free:
            visible = visible if storage.hidden else storage.dtype
            blocks[event.ref] = len(blocks)
        changes.append(Change(free, blocks[event.ref], storage.num_bytes, trace.op(storage)))
    return {"changes": changes}


def cpu(name: str) -> dict[str, Any]:
    """The changes of the CPU's allocator while the script really runs, as torch's profiler sees them."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from memprof.script import Program, StopRule

    script, arguments = _arguments(name)
    recording = profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True)
    with _gpu_is_the_host(), torch.backends.mkldnn.flags(enabled=False), recording as recorded:
        outcome = Program(script, tuple(arguments)).run(StopRule(None))
        gc.collect()
    if outcome.exit_code:
        traceback.print_exception(outcome.error)
        raise RuntimeError(f"the script failed on the CPU: {outcome.error!r}")
    return {"changes": _changes(recorded)}


@contextlib.contextmanager
def _gpu_is_the_host() -> Iterator[None]:
    """Inside, "cuda" is the CPU: a first move there is a copy; what is done on the host alone is marked."""
    import peft
    import torch
    from torch.optim import optimizer
    from torch.profiler import record_function
    from torch.utils import _foreach_utils
    from torch.utils.data import dataloader

    from memprof.patching import PatchSet

    on_gpu: weakref.WeakSet[Any] = weakref.WeakSet()
    move = torch.Tensor.to

    def device_of(value: Any) -> Any:
        named = isinstance(value, (str, torch.device))
        return torch.device("cpu") if named and str(value).startswith("cuda") else value

    building = False

    def to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if building:
            return move(tensor, *map(device_of, args), **{k: device_of(v) for k, v in kwargs.items()})
        device, _, _, _ = torch._C._nn._parse_to(
            *map(device_of, args), **{k: device_of(v) for k, v in kwargs.items() if k != "copy"}
        )
        moved = move(tensor, *map(device_of, args), **{k: device_of(v) for k, v in kwargs.items()})
        # Where another tensor is, is known of none but those that the host has made.
        like = bool(args) and isinstance(args[0], torch.Tensor)
        if device is None or (like and tensor.untyped_storage() not in on_host):
            return moved
        if moved.untyped_storage() not in on_gpu and moved is tensor:
            with record_function(TO_GPU):
                moved = moved.clone()
        on_gpu.add(moved.untyped_storage())
        return moved

    def made(function: Callable[..., Any]) -> Callable[..., Any]:
        """A factory; what it makes on the GPU is there, and what it makes elsewhere is the host's."""

        def make(*args: Any, **kwargs: Any) -> Any:
            device = kwargs.get("device")
            if device is None:
                with record_function(_HOST):
                    found = function(*args, **kwargs)
                on_host.add(found.untyped_storage())
                return found
            found = function(*args, **{**kwargs, "device": device_of(device)})
            on_gpu.add(found.untyped_storage())
            return found

        return make

    on_host: weakref.WeakSet[Any] = weakref.WeakSet()
    stack, from_numpy = torch.stack, torch.from_numpy

    def from_array(array: Any) -> Any:
        made = from_numpy(array)
        on_host.add(made.untyped_storage())
        return made

    def stacked(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        host = all(tensor.untyped_storage() in on_host for tensor in tensors)
        with record_function(_HOST if host else "stack"):
            return stack(tensors, *args, **kwargs)

    def hosted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with record_function(_HOST):
                return function(*args, **kwargs)

        return call

    def lists() -> list[str]:
        return ["cuda", "cpu"]

    def adapters(function: Callable[..., Any]) -> Callable[..., Any]:
        """PEFT moves new weights to where the model is: as yet on the host, which here has the GPU's name."""

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal building
            building = True
            try:
                return function(*args, **kwargs)
            finally:
                building = False

        return call

    patches = PatchSet()
    patches.set(peft, "get_peft_model", adapters(peft.get_peft_model))
    patches.set(torch.Tensor, "to", to)
    patches.set(torch.Tensor, "cuda", lambda tensor, *args, **kwargs: to(tensor, "cuda"))
    patches.set(torch.nn.Module, "cuda", lambda module, *args: module.to("cpu"))
    for name in ("arange", "empty", "full", "ones", "rand", "randint", "randn", "randperm", "tensor", "zeros"):
        patches.set(torch, name, made(getattr(torch, name)))
    patches.set(torch, "from_numpy", from_array)
    patches.set(torch, "stack", stacked)
    patches.set(torch.Tensor, "cpu", hosted(torch.Tensor.cpu))
    patches.set(torch.Tensor, "pin_memory", hosted(lambda tensor, *args: tensor.clone()))
    patches.set(torch, "save", hosted(torch.save))
    patches.set(torch._tensor_str, "_str", hosted(torch._tensor_str._str))
    patches.set(torch, "load", hosted(torch.load))
    loader = dataloader._BaseDataLoaderIter
    patches.set(loader, "__next__", hosted(loader.__next__))
    patches.set(torch.cuda, "synchronize", lambda *args: None)
    patches.set(torch.cuda, "max_memory_allocated", lambda *args: 0)
    for owner in (_foreach_utils, optimizer):
        patches.set(owner, "_get_foreach_kernels_supported_devices", lists)
        if hasattr(owner, "_get_fused_kernels_supported_devices"):
            patches.set(owner, "_get_fused_kernels_supported_devices", lists)
    try:
        yield
    finally:
        patches.undo()


def _changes(recorded: Any) -> list[Change]:
    """In order; what is allocated on the host alone is left out with its frees, as is all before the first move."""
    found: list[tuple[int, int, int, tuple[Call, ...], bool, bool]] = []
    number = 0
    first_move = None

    def walk(node: Any, calls: tuple[Call, ...], host: bool, moves: bool) -> None:
        nonlocal number, first_move
        if node.typed[0].name == "Allocation":
            extra = node.extra_fields
            found.append((node.start_time_ns, extra.alloc_size, extra.ptr, calls, host, moves))
        elif node.name == _HOST:
            host = True
        elif node.name == TO_GPU:
            moves = True
            first_move = node.start_time_ns if first_move is None else min(first_move, node.start_time_ns)
        elif node.name.startswith("aten::"):
            number += 1
            calls = (*calls, call_of(node, number))
        for child in node.children:
            walk(child, calls, host, moves)

    for root in recorded.profiler.kineto_results.experimental_event_tree():
        walk(root, (), False, False)
    found.sort(key=lambda change: change[0])
    changes: list[Change] = []
    blocks: dict[int, int | None] = {}
    count = 0
    for time, num_bytes, address, calls, host, moves in found:
        op = TO_GPU if moves else calls[-1].name if calls else ""
        if num_bytes > 0:
            if host or first_move is None or time < first_move:
                blocks[address] = None
                continue
            blocks[address] = count
            changes.append(Change(False, count, num_bytes, op, calls))
            count += 1
        else:
            block = blocks.pop(address, None)
            if block is not None:
                changes.append(Change(True, block, -num_bytes, op, calls))
    return changes


# -- processes --------------------------------------------------------------------------------------------------------


def _forked(side: Callable[[str], dict[str, Any]], name: str) -> dict[str, Any]:
    """What `side` says of a script, in a process of its own, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"
        child = os.fork()
        if not child:
            code = 1
            try:
                os.chdir(folder)
                errors = open("stderr", "w")  # noqa: SIM115
                os.dup2(errors.fileno(), 1)
                os.dup2(errors.fileno(), 2)
                told = side(name)
                answer.write_bytes(pickle.dumps(told))
                code = 0
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        if status:
            said = (Path(folder) / "stderr").read_text(errors="replace")
            raise RuntimeError(f"{name}, {side.__name__}:\n{said[-4000:]}")
        return pickle.loads(answer.read_bytes())  # type: ignore[no-any-return]


def main() -> None:
    result, *names = sys.argv[1:]
    os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
    import torch

    torch.set_num_threads(1)  # kernels keep scratch memory per thread; and a process that forks has one
    with contextlib.redirect_stdout(io.StringIO()):
        import peft  # noqa: F401
        import transformers
        import transformers.trainer

        del transformers
    gc.collect()
    gc.freeze()  # what the libraries made is no garbage of a script
    found = {}
    for name in names or SCRIPTS:
        found[name] = {"cpu": _forked(cpu, name)["changes"], "virtual": _forked(virtual, name)["changes"]}
        print(name, {side: len(changes) for side, changes in found[name].items()}, file=sys.stderr, flush=True)
    Path(result).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main()
