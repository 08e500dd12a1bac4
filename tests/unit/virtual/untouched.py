"""Prints what differs once a virtual GPU was imported, entered and left: nothing is to.

A process of its own, since memprof's import counts too. First the same program runs on the CPU alone, so that what
torch sets up by itself is there before.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import types
import warnings

import torch
import torch._dynamo
import torch.utils.checkpoint
import torch.utils.data
import torch.utils.flop_counter
from torch import nn

PACKAGES = {"torch", "safetensors", "multiprocessing", "concurrent", "numpy", "atexit", "os", "io", "pickle", "random"}
TORCHS_OWN = {"reduce_op", "next_id"}  # It warns when it is looked at; it counts.


def program(device: str) -> tuple[str, ...]:
    """A step of training with most of what torch offers for it; the nodes that autograd makes of a norm."""
    model = nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4), nn.Dropout(), nn.LayerNorm(4), nn.Mish()).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 4)), batch_size=4)
    for (rows,) in loader:
        states = torch.utils.checkpoint.checkpoint(model, rows.to(device), use_reentrant=False)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model[0](states).float().sum()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    weight = torch.ones(4, device="meta" if device == "cpu" else device, requires_grad=True)
    norm = torch.ops.aten._fused_rms_norm(weight * 2, (4,), weight, None)[0]
    return str(loss.device), norm.grad_fn.name()


def fingerprint() -> dict[tuple[str, ...], object]:
    """Every attribute of these packages' modules and classes, torch's tables of kernels, and the process's state."""
    found: dict[tuple[str, ...], object] = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] not in PACKAGES or not isinstance(module, types.ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if name in TORCHS_OWN or isinstance(value, types.ModuleType):
                continue
            found[module_name, name] = value
            if isinstance(value, type) and value.__module__ == module_name:
                own = [(key, each) for key, each in vars(value).items() if key not in TORCHS_OWN]
                found.update(((module_name, name, key), each) for key, each in own)
    for operator in torch._C._dispatch_get_all_op_names():
        if not operator.startswith("bitsandbytes::"):  # its kernels come with a module of its own
            found["kernels", operator] = torch._C._dispatch_dump(operator)
    found |= {("environment", name): value for name, value in os.environ.items()}
    found["process", "warnings"] = list(warnings.filters)
    found["process", "garbage"] = gc.isenabled(), gc.get_threshold(), list(gc.callbacks)
    found["process", "imports"] = list(sys.path), list(sys.meta_path), list(sys.path_hooks)
    found["process", "hooks"] = sys.excepthook, sys.unraisablehook, sys.gettrace(), sys.getprofile()
    found["process", "signals"] = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
    found["process", "modes"] = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    return found


def changed(before: dict[tuple[str, ...], object], after: dict[tuple[str, ...], object]) -> list[tuple[str, ...]]:
    """What is new, gone or another, but for modules that were imported meanwhile."""
    modules = {key[0] for key in before}
    new = [key for key in after.keys() - before.keys() if key[0] in modules]
    same = [key for key in before.keys() & after.keys() if after[key] is before[key] or after[key] == before[key]]
    return [*new, *(before.keys() - same)]


if __name__ == "__main__":
    alone = program("cpu")
    before = fingerprint()

    from memprof.device.catalog import find_gpu
    from memprof.virtual import VirtualGpu

    imported = fingerprint()
    with VirtualGpu(find_gpu("a100-80gb")):
        simulated = program("cuda")
        inside = fingerprint()
    after = fingerprint()
    print("import:", changed(before, imported))
    print("run:", changed(imported, after))
    print("same program, same torch:", program("cpu") == alone, simulated, len(changed(imported, inside)) > 300)
