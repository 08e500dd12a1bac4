"""Both sides of the comparison of ranks with the CPU: a program for several processes, really run by as many over gloo,
and each of its ranks alone on the virtual GPU.

    python -m tests.accuracy.rank_events RESULT [NAME ...]

The programs are those of tests/programs/parallel.py, unmodified. Each rank of each side is a process of its own, forked
after the libraries were imported.
"""

from __future__ import annotations

import gc
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from tests.accuracy.cpu_events import Change, changes_of, recorded_changes
from tests.processes import ROOT

SCRIPT = str(ROOT / "tests" / "programs" / "parallel.py")
SIZES = {"hsdp": 4}  # How many ranks a program has where not two.


def _environment(rank: int, size: int, port: int, **more: str) -> None:
    numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(number) for name, number in numbers.items()}, MASTER_ADDR="127.0.0.1", **more)


def virtual(name: str, rank: int, size: int, port: int) -> list[Change]:
    """The changes on the GPU of a rank that runs alone."""
    from memprof.device.catalog import find_gpu
    from memprof.script import Program, StopRule
    from memprof.script.capture import capture_script
    from memprof.virtual import VirtualGpu
    from tests.accuracy.cpu_temporaries import is_shared

    _environment(rank, size, port)
    gpu = VirtualGpu(find_gpu("a100-80gb"), gpus=size, rank=rank, workspaces=False)
    trace, outcome = capture_script(Program(SCRIPT, (name,)), gpu, StopRule(None))
    if outcome.exit_code:
        raise RuntimeError(f"{name} failed on the virtual GPU: {outcome.error!r}")
    return recorded_changes(trace, 0, len(trace.events), is_shared)


def cpu(name: str, rank: int, size: int, port: int) -> list[Change]:
    """The changes of the CPU's allocator in a rank that really runs, as torch's profiler sees them."""
    import torch
    from torch.optim import optimizer
    from torch.profiler import ProfilerActivity, profile
    from torch.utils import _foreach_utils

    from memprof.script import Program, StopRule

    _environment(rank, size, port, BACKEND="gloo")
    for owner in (_foreach_utils, optimizer):  # which optimizer a GPU has
        owner._get_foreach_kernels_supported_devices = lambda: ["cuda", "cpu"]
    kept = _flash_attention()
    _let_threads_end()
    recording = profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True)
    with torch.backends.mkldnn.flags(enabled=False), recording as recorded:
        outcome = Program(SCRIPT, (name,)).run(StopRule(None))
        gc.collect()
    del kept
    if outcome.exit_code:
        traceback.print_exception(outcome.error)
        raise RuntimeError(f"{name} failed on the CPU: {outcome.error!r}")
    return changes_of(recorded)


def _let_threads_end() -> None:
    """Wait after each collective for gloo's thread to let go of its result: autograd adds to a gradient in place only
    where it is the last to hold it, as it is on a GPU."""
    from torch.distributed import _functional_collectives as collectives

    wait = collectives.wait_tensor

    def wait_tensor(tensor: Any) -> Any:
        result = wait(tensor)
        time.sleep(0.005)
        return result

    collectives.wait_tensor = wait_tensor


def _flash_attention() -> Any:
    """CUDA's flash attention for the CPU, by the CPU's own, for torch's ring; returns what keeps it registered."""
    import torch
    from torch.nn import functional

    aten = torch.ops.aten

    def attention(q: Any, k: Any, v: Any, *args: Any, is_causal: bool = False, **options: Any) -> Any:
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]

    def forward(q: Any, k: Any, v: Any, p: float = 0.0, causal: bool = False, *args: Any, scale: Any = None) -> Any:
        out, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, p, causal, scale=scale)
        number = torch.zeros(2, dtype=torch.uint64)
        none = None
        return out, sums, none, none, q.size(2), k.size(2), number, torch.empty((), dtype=torch.uint64), none

    def backward(
        gradient: Any, q: Any, k: Any, v: Any, out: Any, sums: Any, _q: Any, _k: Any, _mq: Any, _mk: Any, p: float,
        causal: bool, *numbers: Any, scale: Any = None,
    ) -> Any:  # fmt: skip
        op = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return op(gradient, q, k, v, out, sums, p, causal, scale=scale)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", forward, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", backward, "CPU")
    attention.__name__ = "scaled_dot_product_attention"
    functional.scaled_dot_product_attention = attention
    return library


# -- processes --------------------------------------------------------------------------------------------------------


class _Forked:
    """`side` of a rank, in a process of its own, in a folder of its own."""

    def __init__(self, side: Any, name: str, rank: int, size: int, port: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._answer = Path(self._folder.name) / "answer"
        self._errors = Path(self._folder.name) / "stderr"
        self._of = f"{name}, rank {rank}, {side.__name__}"
        self._child = os.fork()
        if self._child:
            return
        code = 1
        try:
            os.chdir(self._folder.name)
            errors = self._errors.open("w")
            os.dup2(errors.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            gc.disable()
            self._answer.write_bytes(pickle.dumps(side(name, rank, size, port)))
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)

    def result(self) -> list[Change]:
        with self._folder:
            if os.waitpid(self._child, 0)[1]:
                raise RuntimeError(f"{self._of}:\n{self._errors.read_text(errors='replace')[-4000:]}")
            return pickle.loads(self._answer.read_bytes())  # type: ignore[no-any-return]


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def both(name: str) -> list[dict[str, list[Change]]]:
    size = SIZES.get(name, 2)
    port = _free_port()
    really = [_Forked(cpu, name, rank, size, port) for rank in range(size)]
    found = [{"cpu": one.result()} for one in really]
    for rank, sides in enumerate(found):
        sides["virtual"] = _Forked(virtual, name, rank, size, port).result()
    return found


def main() -> None:
    result, *names = sys.argv[1:]
    os.environ.update(CUDA_VISIBLE_DEVICES="")
    import torch
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel

    torch.set_num_threads(1)  # kernels keep scratch memory per thread; and a process that forks has one
    gc.collect()
    gc.freeze()
    Path(result).write_bytes(pickle.dumps({name: both(name) for name in names}))


if __name__ == "__main__":
    main()
