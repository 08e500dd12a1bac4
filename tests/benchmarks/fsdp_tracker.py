"""One rank of `fully_shard`, by memprof and by torch's own FSDPMemTracker under FakeTensorMode: time and peak.

    python -m tests.benchmarks.fsdp_tracker [--layers 32] [--tokens 8192] [--ranks 8] [--repeat 3]

A Llama of 8B parameters, each layer wrapped, in bfloat16 with float32 parts, AdamW, two steps. Each side is a process
of its own, in turn; seconds are those of a processor, from before the model is built, and the median of repetitions.
The peer runs with fake *CPU* tensors and torch's `fake` process group: a build without CUDA cannot run a backward on
fake CUDA tensors.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
STEP = """
import resource, time, warnings
import torch, torch.distributed as dist, transformers
import transformers.models.llama.modeling_llama
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
config = transformers.LlamaConfig(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers={layers}, num_attention_heads=32,
    num_key_value_heads=8, vocab_size=128256, use_cache=False, attn_implementation="sdpa",
)

def sharded(device, mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).train()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    return model, torch.optim.AdamW(model.parameters(), foreach=True)

def train(model, optimizer, device, peak, between=lambda: None):
    # The peak of the first forward and backward, and of both steps.
    for step in range(2):
        between()
        ids = torch.zeros(1, {tokens}, dtype=torch.int64, device=device)
        model(input_ids=ids, labels=ids).loss.backward()
        first = first if step else peak()
        optimizer.step()
        optimizer.zero_grad()
    return first, peak()

def told(begin, peaks):
    print(time.process_time() - begin, *peaks, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""
OURS = """
import memprof, memprof.api
begin = time.process_time()
with memprof.virtual_gpus({ranks}, "h100-80gb", rank=0) as gpus:
    dist.init_process_group("nccl")
    model, optimizer = sharded("cuda", init_device_mesh("cuda", ({ranks},)))
    peaks = train(model, optimizer, "cuda", torch.cuda.max_memory_allocated)
gpus.report()
told(begin, peaks)
"""
PEER = """
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore
begin = time.process_time()
dist.init_process_group("fake", rank=0, world_size={ranks}, store=FakeStore())
mesh = init_device_mesh("cpu", ({ranks},))
with FakeTensorMode():
    model, optimizer = sharded("cpu", mesh)
    tracker = FSDPMemTracker(model, optimizer)
    with tracker:
        peak = lambda: tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
        peaks = train(model, optimizer, "cpu", peak, tracker.reset_mod_stats)
told(begin, peaks)
"""


def run(side: str, options: argparse.Namespace) -> list[float]:
    """Seconds, the two peaks that it says, and its own resident memory, in bytes."""
    code = (STEP + side).replace("{layers}", str(options.layers)).replace("{tokens}", str(options.tokens))
    command = [sys.executable, "-c", code.replace("{ranks}", str(options.ranks))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        raise SystemExit(f"failed with {done.returncode}:\n{done.stderr[-3000:]}")
    return [float(word) for word in done.stdout.split()[-4:]]


def main() -> None:
    """Print a line for each side, and the ratio of their seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    made = [[run(side, options) for side in (OURS, PEER)] for _ in range(options.repeat)]
    medians = []
    for name, runs in zip(("memprof", "FSDPMemTracker"), zip(*made, strict=True), strict=True):
        seconds, first, both, resident = (statistics.median(values) for values in zip(*runs, strict=True))
        medians.append(seconds)
        print(
            f"{name:15} {seconds:6.1f} s; peak of the first forward and backward {first / GIB:6.2f} GiB, of both steps "
            f"{both / GIB:6.2f} GiB; {resident / GIB:.2f} GiB of host memory"
        )
    print(f"seconds, memprof / FSDPMemTracker: {medians[0] / medians[1]:.2f}")


if __name__ == "__main__":
    main()
