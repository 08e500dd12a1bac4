"""The code to paste for inference over cards, `device_map` and tensor parallelism, with the lines that start it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memprof.flows.recommend.card_scripts import STYLES, environment, loading
from memprof.flows.recommend.snippet import LoadedModel
from memprof.spec import TargetSpec
from memprof.workload.plan import DEVICE_MAP

if TYPE_CHECKING:
    from memprof.flows.recommend.search import Tried

TENSOR_PARALLEL = "tensor-parallel"
_CARDS_OF_A_MACHINE = 8


def serving_scripts(fitting: Sequence[tuple[str, Tried]], model: LoadedModel) -> dict[str, tuple[str, str]]:
    """A text and its launch line for each of the ways, which fit; the name of `--parallel` says which it is."""
    found = {}
    for plan, tried in fitting:
        spec = tried.outcome.spec
        if plan == DEVICE_MAP:
            found[DEVICE_MAP] = device_map_script(spec, model), "python infer.py"
        else:
            machines = -(-spec.gpus // _CARDS_OF_A_MACHINE)
            nodes = f"--nnodes {machines} --rdzv-backend c10d --rdzv-endpoint HOST:29500 " if machines > 1 else ""
            start = f"torchrun {nodes}--nproc-per-node {spec.gpus // machines} infer_tp.py"
            found[TENSOR_PARALLEL] = tensor_parallel_script(spec, model), start
    return found


def device_map_script(spec: TargetSpec, model: LoadedModel) -> str:
    """`infer.py`: one process, some of the layers on each card."""
    imports = ["import torch", "import transformers"]
    placed: list[str] = []
    if not model.from_pretrained:
        imports = ["import accelerate", *imports, "from accelerate.utils import get_balanced_memory"]
        placed = [
            "whole = list(model._no_split_modules)",
            "memory = get_balanced_memory(model, no_split_module_classes=whole)",
            "cards = accelerate.infer_auto_device_map(model, max_memory=memory, no_split_module_classes=whole)",
            "accelerate.dispatch_model(model, cards)",
        ]
    lines = [*(environment(spec) if spec.alloc_conf else []), *imports, ""]
    return "\n".join([*lines, *loading(spec, model, 'device_map="auto"'), *placed, *_generates(spec)]) + "\n"


def tensor_parallel_script(spec: TargetSpec, model: LoadedModel) -> str:
    """`infer_tp.py`: a rank on each card, which has a part of each matrix."""
    lines = [
        *environment(spec, "import fnmatch"),
        "import torch",
        "import torch.distributed as dist",
        "import transformers",
        "from torch.distributed.device_mesh import init_device_mesh",
        "from torch.distributed.tensor import Replicate",
        "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module",
        "",
        'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))',
        'dist.init_process_group("nccl")',
        f'mesh = init_device_mesh("cuda", ({spec.gpus},), mesh_dim_names=("tensor",))',
        *loading(spec, model),
        STYLES,
        'model.to("cuda")',
        "torch.manual_seed(0)  # all ranks are given the same prompt",
        *_generates(spec),
        "dist.destroy_process_group()",
    ]
    return "\n".join(lines) + "\n"


def _generates(spec: TargetSpec) -> list[str]:
    asked = f"max_new_tokens={spec.new_tokens}, do_sample=False"
    called = f"model.generate(prompt, {asked})" if spec.new_tokens else "model(prompt).logits"
    return [
        "model.eval()",
        f"batch, length = {spec.batch_size}, {spec.context_length}",
        'prompt = torch.randint(model.config.vocab_size, (batch, length), device="cuda")  # yours',
        "with torch.no_grad():",
        f"    output = {called}",
        "print(output.shape)",
    ]
