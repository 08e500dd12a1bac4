"""The code to paste for runs over several GPUs, each with its launch line: training with plain PyTorch, accelerate and
torchtitan; inference with `device_map` and with tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from memprof.flows.gpus import GPUS_PER_MACHINE
from memprof.flows.recommend import snippet
from memprof.flows.recommend.parallel_plans import Way
from memprof.flows.recommend.plans import Activations, Goal
from memprof.flows.recommend.search import Tried
from memprof.flows.recommend.simulator import Simulator
from memprof.flows.recommend.snippet import LoadedModel, loaded_model
from memprof.spec import TargetSpec
from memprof.units import format_bytes
from memprof.workload.catalog import find_model, has_model, resolve_size
from memprof.workload.plan import DEVICE_MAP

FULLY_SHARD, ACCELERATE, ACCELERATE_YAML, TORCHTITAN = "fully-shard", "accelerate", "accelerate-yaml", "torchtitan"
TENSOR_PARALLEL = "tensor-parallel"

STYLES = """styles = {
    "colwise": ColwiseParallel(),
    "rowwise": RowwiseParallel(),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": ColwiseParallel(output_layouts=Replicate()),
    "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
    "vocab_rowwise": RowwiseParallel(input_layouts=Replicate()),
}
shared = {}
for name, _ in model.named_modules():
    for pattern, style in model.tp_plan.items():
        if style in styles and fnmatch.fnmatch(name, pattern):
            shared[name] = styles[style]
parallelize_module(model, mesh["tensor"], shared)"""

# Models of torchtitan 0.2, the last with configurations in TOML (torchtitan/models/*/__init__.py of v0.2.2).
# Models with a tied head are left out: fully_shard of torch 2.13 rejects their sharding by torchtitan.
_TORCHTITAN_MODELS = {
    "llama-3.1-8b": ("llama3", "8B"), "llama-3.1-70b": ("llama3", "70B"), "llama-3.1-405b": ("llama3", "405B"),
    "qwen3-8b": ("qwen3", "8B"), "qwen3-14b": ("qwen3", "14B"), "qwen3-32b": ("qwen3", "32B"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scripts:
    """Scripts by kind: text, launch command, and the configuration, where it is not the chosen one."""

    texts: dict[str, str] = field(default_factory=dict)
    launch: dict[str, str] = field(default_factory=dict)
    written_for: dict[str, str] = field(default_factory=dict)


def training_scripts(fitting: Sequence[tuple[Way, Tried]], runs: Simulator, spec: TargetSpec) -> Scripts:
    """Return the script of the chosen configuration, the first of `fitting`, and of each library the first possible.

    Models from the user's code get no scripts.
    """
    found, model = Scripts(), loaded_model(spec)
    if model is None:
        return found
    chosen, tried = fitting[0]
    found.texts[FULLY_SHARD] = fully_shard_script(chosen, tried.outcome.spec, model)
    found.launch[FULLY_SHARD] = _torchrun_command(chosen.spread.size, "train.py")

    def note(way: Way, tried: Tried, *kinds: str) -> None:
        if way != chosen:
            verdict = "fits" if runs.has_room(tried.outcome) else "fits, with allocator retries"
            label = f"{way.label()}; needs {format_bytes(tried.outcome.needed_bytes)}, {verdict}"
            found.written_for.update(dict.fromkeys(kinds, label))

    for way, tried in fitting:
        # accelerate shards the head separately, which a chunked loss cannot use.
        if not way.plan.chunked_loss and way.parallel in ("ddp", "fsdp", "fsdp:shard_grad_op"):
            found.texts[ACCELERATE_YAML] = accelerate_yaml(way)
            found.texts[ACCELERATE] = accelerate_script(way, tried.outcome.spec, model)
            found.launch[ACCELERATE] = "accelerate launch --config_file accelerate.yaml train_accelerate.py"
            note(way, tried, ACCELERATE_YAML, ACCELERATE)
            break
    name = resolve_size(spec.model).key if spec.model_is_size else spec.model
    name = find_model(name).key if has_model(name) else name
    for way, tried in fitting if name in _TORCHTITAN_MODELS else ():
        if way.plan.goal is Goal.FULL and not way.plan.chunked_loss and way.plan.precision != "float32":
            found.texts[TORCHTITAN] = torchtitan_toml(way, tried.outcome.spec, *_TORCHTITAN_MODELS[name])
            start = "-m torchtitan.train --job.config_file train.toml"
            found.launch[TORCHTITAN] = _torchrun_command(way.spread.size, start)
            note(way, tried, TORCHTITAN)
            break
    return found


def serving_scripts(fitting: Sequence[tuple[str, Tried]], spec: TargetSpec) -> Scripts:
    """Return a script for each of `fitting`: pairs of a name of `--parallel` and a run."""
    found, model = Scripts(), loaded_model(spec)
    if model is None:
        return found
    for plan, tried in fitting:
        made = tried.outcome.spec
        if plan == DEVICE_MAP:
            found.texts[DEVICE_MAP] = _device_map_script(made, model)
            found.launch[DEVICE_MAP] = "python infer.py"
        else:
            found.texts[TENSOR_PARALLEL] = _tensor_parallel_script(made, model)
            found.launch[TENSOR_PARALLEL] = _torchrun_command(made.gpus, "infer_tp.py")
    return found


def _torchrun_command(gpus: int, what: str) -> str:
    machines = -(-gpus // GPUS_PER_MACHINE)
    nodes = f"--nnodes {machines} --rdzv-backend c10d --rdzv-endpoint HOST:29500 " if machines > 1 else ""
    return f"torchrun {nodes}--nproc-per-node {gpus // machines} {what}"


def _load_lines(spec: TargetSpec, model: LoadedModel, *more: str) -> list[str]:
    """Return the lines that load the model into host memory; `more` are further arguments of from_pretrained."""
    arguments = snippet.load_arguments(spec)
    if not model.from_pretrained:
        return snippet.make_lines(model, arguments)
    given = ", ".join([repr(model.from_pretrained), *arguments, *more])
    return [f"model = transformers.{model.auto_class}.from_pretrained({given})"]


def _model_lines(way: Way, spec: TargetSpec, model: LoadedModel) -> list[str]:
    adapter = snippet.lora_lines(spec) if way.plan.goal is Goal.LORA else []
    return [*_load_lines(spec, model), "model.config.use_cache = False", *adapter]


def _batch_lines() -> list[str]:
    return [
        "",
        "",
        "def batches():  # yours; ranks that share their tensors are given the same",
        "    while True:",
        "        ids = torch.randint(model.config.vocab_size, (micro_batch, length))",
        '        yield {"input_ids": ids.to("cuda"), "labels": ids.to("cuda")}',
        "",
        "",
    ]


def fully_shard_script(way: Way, spec: TargetSpec, model: LoadedModel) -> str:
    """Return `train.py`, which does the same as the workload of `memprof profile --parallel` (workload/spread.py)."""
    spread, plan = way.spread, way.plan
    meshes = {"replicate": spread.replicate, "shard": spread.shard, "tensor": spread.tensor}
    shape = {name: size for name, size in meshes.items() if size > 1 or (name == "shard" and spread.sharded)}
    imports = ["import torch", "import torch.distributed as dist", "import transformers"]
    tools = ["from torch.distributed.device_mesh import init_device_mesh"]
    if spread.sharded:
        policy = "MixedPrecisionPolicy, " if spec.amp else ""
        tools.append(f"from torch.distributed.fsdp import {policy}fully_shard")
    if spread.tensor > 1:
        tools += [
            "from torch.distributed.tensor import Replicate",
            "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module",
        ]
    if plan.goal is Goal.LORA:
        imports.insert(0, "import peft")
    standard = ["import fnmatch", "import os"] if spread.tensor > 1 else ["import os"]
    library = ["", "import memprof"] if spec.fixes else []
    lines = [
        *snippet.environment_lines(spec, *standard), *imports, *tools, *library, "",
        'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))',
        'dist.init_process_group("nccl")',
        f'mesh = init_device_mesh("cuda", {tuple(shape.values())}, mesh_dim_names={tuple(shape)})',
        f"micro_batch, accumulation, length = {spec.batch_size}, {way.accumulation}, {spec.context_length}",
        "",
        *_model_lines(way, spec, model),
    ]  # fmt: skip
    if spread.tensor > 1:
        lines.append(STYLES)
    if spread.sharded:
        lines += _sharding_lines(way, spec)
    lines.append('model.to("cuda")')
    model_name = "model" if spread.sharded or spread.data == 1 else "wrapped"
    if model_name == "wrapped":
        lines.append("wrapped = torch.nn.parallel.DistributedDataParallel(")
        lines.append(
            '    model, device_ids=[torch.cuda.current_device()], process_group=mesh["replicate"].get_group())'
        )
    lines += [
        *snippet.apply_lines(spec.fixes),
        "groups = {}  # an optimizer's operators take parameters of one mesh",
        "for parameter in model.parameters():",
        "    if parameter.requires_grad:",
        '        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)',
        'optimizer = torch.optim.AdamW([{"params": group} for group in groups.values()], lr=1e-4, fused=True)',
        *_batch_lines(),
        "model.train()",
        "data = batches()",
        "for step in range(2):",
        "    for micro in range(accumulation):",
    ]
    if model_name == "wrapped":
        lines.append("        wrapped.require_backward_grad_sync = micro == accumulation - 1")
    if spec.amp and not spread.sharded:
        lines.append(f'        with torch.autocast("cuda", dtype=torch.{spec.amp}):')
        lines.append(f"            outputs = {model_name}(**next(data))")
    else:
        lines.append(f"        outputs = {model_name}(**next(data))")
    lines += [
        "        loss = outputs.loss / accumulation",
        "        loss.backward()",
        "    optimizer.step()",
        "    optimizer.zero_grad()",
        "    if dist.get_rank() == 0:",
        "        print(step, loss.item() * accumulation)",
        "dist.destroy_process_group()",
    ]
    return "\n".join(lines) + "\n"


def _sharding_lines(way: Way, spec: TargetSpec) -> list[str]:
    spread = way.spread
    names = '"replicate", "shard"' if spread.replicate > 1 else '"shard"'
    lines = [f"sharding = dict(mesh=mesh[{names}])"]
    if spec.amp:
        lines.append(
            f'sharding["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.{spec.amp}, reduce_dtype=torch.float32)'
        )
    if not spread.reshard:
        lines.append('sharding["reshard_after_forward"] = False')
    return [
        *lines,
        "lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]",
        "for layer in max(lists, key=len):",
        "    fully_shard(layer, **sharding)",
        "fully_shard(model, **sharding)",
    ]


def accelerate_yaml(way: Way) -> str:
    """Return `accelerate.yaml`, in the format of `accelerate config`."""
    spread = way.spread
    mixed = {"bfloat16": "bf16", "float16": "fp16"}[way.plan.half] if way.plan.precision == "amp" else "'no'"
    lines = ["compute_environment: LOCAL_MACHINE"]
    if spread.sharded:
        lines += [
            "distributed_type: FSDP",
            "fsdp_config:",
            "  fsdp_version: 2",
            "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
            f"  fsdp_reshard_after_forward: {str(spread.reshard).lower()}",
            "  fsdp_cpu_ram_efficient_loading: false",
            "  fsdp_state_dict_type: SHARDED_STATE_DICT",
        ]
    else:
        lines.append("distributed_type: MULTI_GPU")
    lines += [f"mixed_precision: {mixed}", "num_machines: 1", f"num_processes: {spread.size}", "machine_rank: 0"]
    return "\n".join(lines) + "\n"


def accelerate_script(way: Way, spec: TargetSpec, model: LoadedModel) -> str:
    """Return `train_accelerate.py`, a training script with accelerate."""
    imports = ["import accelerate", "import torch", "import transformers"]
    if way.plan.goal is Goal.LORA:
        imports.insert(1, "import peft")
    lines = [
        *snippet.environment_lines(spec), *imports, *(["", "import memprof"] if spec.fixes else []), "",
        f"micro_batch, accumulation, length = {spec.batch_size}, {way.accumulation}, {spec.context_length}",
        "accelerator = accelerate.Accelerator(gradient_accumulation_steps=accumulation)",
        *_model_lines(way, spec, model),
        "optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)",
        "model, optimizer = accelerator.prepare(model, optimizer)",
        *snippet.apply_lines(spec.fixes, "accelerator.unwrap_model(model)"),
        *_batch_lines(),
        "model.train()",
        "data = batches()",
        "for step in range(2 * accumulation):",
        "    with accelerator.accumulate(model):",
        "        loss = model(**next(data)).loss",
        "        accelerator.backward(loss)",
        "        optimizer.step()",
        "        optimizer.zero_grad()",
        "    accelerator.print(step, loss.item())",
        "accelerator.end_training()",
    ]  # fmt: skip
    return (
        "\n".join(lines)
        .replace("model.config.vocab_size, (micro", "vocabulary, (micro")
        .replace("optimizer = torch", "vocabulary = model.config.vocab_size\noptimizer = torch", 1)
        + "\n"
    )


def torchtitan_toml(way: Way, spec: TargetSpec, name: str, flavor: str) -> str:
    """Return `train.toml` of torchtitan 0.2 (torchtitan/config/job_config.py)."""
    spread = way.spread
    checkpointed = way.plan.activations is Activations.CHECKPOINTED
    whole = "bfloat16" if way.plan.precision == "half" else "float32"
    return f"""# torchtitan 0.2
[model]
name = "{name}"
flavor = "{flavor}"
hf_assets_path = "./assets/hf"  # its tokenizer: yours

[optimizer]
name = "AdamW"
lr = 1e-4
implementation = "fused"

[training]
local_batch_size = {spec.batch_size}
global_batch_size = {spec.batch_size * way.accumulation * spread.data}
seq_len = {spec.context_length}
steps = 2
dataset = "c4"
dtype = "{whole}"
mixed_precision_param = "{way.plan.half}"
mixed_precision_reduce = "{whole}"

[parallelism]
data_parallel_replicate_degree = {spread.replicate}
data_parallel_shard_degree = {spread.shard}
fsdp_reshard_after_forward = "{"default" if spread.reshard else "never"}"
tensor_parallel_degree = {spread.tensor}

[activation_checkpoint]
mode = "{"full" if checkpointed else "none"}"
"""


def _device_map_script(spec: TargetSpec, model: LoadedModel) -> str:
    """Return `infer.py`: inference in one process with some layers on each GPU."""
    imports = ["import torch", "import transformers"]
    placed: list[str] = []
    if not model.from_pretrained:
        imports = ["import accelerate", *imports, "from accelerate.utils import get_balanced_memory"]
        placed = [
            "whole = list(model._no_split_modules)",
            "memory = get_balanced_memory(model, no_split_module_classes=whole)",
            "GPUs = accelerate.infer_auto_device_map(model, max_memory=memory, no_split_module_classes=whole)",
            "accelerate.dispatch_model(model, GPUs)",
        ]
    loading = _load_lines(spec, model, 'device_map="auto"')
    return "\n".join([*snippet.environment_lines(spec), *imports, "", *loading, *placed, *_infer_lines(spec)]) + "\n"


def _tensor_parallel_script(spec: TargetSpec, model: LoadedModel) -> str:
    """Return `infer_tp.py`: inference with tensor parallelism, one rank per GPU."""
    lines = [
        *snippet.environment_lines(spec, "import fnmatch", "import os"),
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
        *_load_lines(spec, model),
        STYLES,
        'model.to("cuda")',
        "torch.manual_seed(0)  # all ranks are given the same prompt",
        *_infer_lines(spec),
        "dist.destroy_process_group()",
    ]
    return "\n".join(lines) + "\n"


def _infer_lines(spec: TargetSpec) -> list[str]:
    return [
        "model.eval()",
        f"batch, length = {spec.batch_size}, {spec.context_length}",
        'prompt = torch.randint(model.config.vocab_size, (batch, length), device="cuda")  # yours',
        *snippet.generate_lines(spec),
    ]
