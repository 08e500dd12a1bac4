"""The code to paste for runs over several GPUs, each with its launch line: training with plain PyTorch, accelerate and
torchtitan; inference with `device_map` and with tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from memprof.flows.gpus import GPUS_PER_MACHINE
from memprof.flows.recommend.parallel_plans import Candidate
from memprof.flows.recommend.plans import Activations, Goal
from memprof.flows.recommend.search import PlanRun
from memprof.flows.recommend.simulator import Simulator
from memprof.flows.recommend.single_gpu_scripts import (
    LoadedModel,
    build_apply_lines,
    build_environment_lines,
    build_generate_lines,
    build_load_arguments,
    build_lora_lines,
    build_model_lines,
    describe_loaded_model,
)
from memprof.spec import TargetSpec
from memprof.units import format_bytes
from memprof.workload.catalog import find_model, has_model, resolve_size
from memprof.workload.plan import DEVICE_MAP

FULLY_SHARD, ACCELERATE, ACCELERATE_YAML, TORCHTITAN = "fully-shard", "accelerate", "accelerate-yaml", "torchtitan"
TENSOR_PARALLEL = "tensor-parallel"

TENSOR_PARALLEL_STYLES = """styles = {
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
    """Source text and launch command of each kind of script; and its configuration, if it is not the chosen one."""

    text_by_kind: dict[str, str] = field(default_factory=dict)
    launch_by_kind: dict[str, str] = field(default_factory=dict)
    configuration_by_kind: dict[str, str] = field(default_factory=dict)


def build_training_scripts(
    runs: Sequence[tuple[Candidate, PlanRun]], simulator: Simulator, spec: TargetSpec
) -> Scripts:
    """Return a PyTorch script for the first of `runs`, and for each library a script for the first run it can express.

    Models from the user's code get no scripts.
    """
    scripts, model = Scripts(), describe_loaded_model(spec)
    if model is None:
        return scripts
    chosen, run = runs[0]
    scripts.text_by_kind[FULLY_SHARD] = build_fully_shard_script(chosen, run.outcome.spec, model)
    scripts.launch_by_kind[FULLY_SHARD] = _build_torchrun_command(chosen.parallel_plan.size, "train.py")

    def record(candidate: Candidate, run: PlanRun, *kinds: str) -> None:
        if candidate != chosen:
            verdict = "fits" if simulator.fits_without_retries(run.outcome) else "fits, with allocator retries"
            label = f"{candidate.format_label()}; needs {format_bytes(run.outcome.needed_bytes)}, {verdict}"
            scripts.configuration_by_kind.update(dict.fromkeys(kinds, label))

    for candidate, run in runs:
        # accelerate shards the head separately, which a chunked loss cannot use.
        if not candidate.plan.chunked_loss and candidate.parallel in ("ddp", "fsdp", "fsdp:shard_grad_op"):
            scripts.text_by_kind[ACCELERATE_YAML] = build_accelerate_yaml(candidate)
            scripts.text_by_kind[ACCELERATE] = build_accelerate_script(candidate, run.outcome.spec, model)
            scripts.launch_by_kind[ACCELERATE] = "accelerate launch --config_file accelerate.yaml train_accelerate.py"
            record(candidate, run, ACCELERATE_YAML, ACCELERATE)
            break
    name = resolve_size(spec.model).key if spec.model_is_size else spec.model
    name = find_model(name).key if has_model(name) else name
    for candidate, run in runs if name in _TORCHTITAN_MODELS else ():
        if (
            candidate.plan.goal is Goal.FULL
            and not candidate.plan.chunked_loss
            and candidate.plan.precision != "float32"
        ):
            scripts.text_by_kind[TORCHTITAN] = build_torchtitan_toml(
                candidate, run.outcome.spec, *_TORCHTITAN_MODELS[name]
            )
            program = "-m torchtitan.train --job.config_file train.toml"
            scripts.launch_by_kind[TORCHTITAN] = _build_torchrun_command(candidate.parallel_plan.size, program)
            record(candidate, run, TORCHTITAN)
            break
    return scripts


def build_serving_scripts(runs: Sequence[tuple[str, PlanRun]], spec: TargetSpec) -> Scripts:
    """Return a script for each of `runs`, which are pairs of an argument of `--parallel` and a run."""
    scripts, model = Scripts(), describe_loaded_model(spec)
    if model is None:
        return scripts
    for plan, run in runs:
        run_spec = run.outcome.spec
        if plan == DEVICE_MAP:
            scripts.text_by_kind[DEVICE_MAP] = _build_device_map_script(run_spec, model)
            scripts.launch_by_kind[DEVICE_MAP] = "python infer.py"
        else:
            scripts.text_by_kind[TENSOR_PARALLEL] = _build_tensor_parallel_script(run_spec, model)
            scripts.launch_by_kind[TENSOR_PARALLEL] = _build_torchrun_command(run_spec.gpus, "infer_tp.py")
    return scripts


def _build_torchrun_command(num_gpus: int, program: str) -> str:
    num_machines = -(-num_gpus // GPUS_PER_MACHINE)
    nodes = f"--nnodes {num_machines} --rdzv-backend c10d --rdzv-endpoint HOST:29500 " if num_machines > 1 else ""
    return f"torchrun {nodes}--nproc-per-node {num_gpus // num_machines} {program}"


def _build_load_lines(spec: TargetSpec, model: LoadedModel, *extra_arguments: str) -> list[str]:
    """Return the lines that load the model into host memory; `extra_arguments` are added to from_pretrained."""
    arguments = build_load_arguments(spec)
    if not model.from_pretrained:
        return build_model_lines(model, arguments)
    all_arguments = ", ".join([repr(model.from_pretrained), *arguments, *extra_arguments])
    return [f"model = transformers.{model.auto_class}.from_pretrained({all_arguments})"]


def _build_model_lines(candidate: Candidate, spec: TargetSpec, model: LoadedModel) -> list[str]:
    adapter = build_lora_lines(spec) if candidate.plan.goal is Goal.LORA else []
    return [*_build_load_lines(spec, model), "model.config.use_cache = False", *adapter]


def _build_batch_lines() -> list[str]:
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


def build_fully_shard_script(candidate: Candidate, spec: TargetSpec, model: LoadedModel) -> str:
    """Return `train.py`, which does the same as the workload of `memprof profile --parallel` (workload/spread.py)."""
    layout, plan = candidate.parallel_plan, candidate.plan
    meshes = {"replicate": layout.replicate, "shard": layout.shard, "tensor": layout.tensor}
    mesh_shape = {name: size for name, size in meshes.items() if size > 1 or (name == "shard" and layout.sharded)}
    imports = ["import torch", "import torch.distributed as dist", "import transformers"]
    from_imports = ["from torch.distributed.device_mesh import init_device_mesh"]
    if layout.sharded:
        policy = "MixedPrecisionPolicy, " if spec.amp else ""
        from_imports.append(f"from torch.distributed.fsdp import {policy}fully_shard")
    if layout.tensor > 1:
        from_imports += [
            "from torch.distributed.tensor import Replicate",
            "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module",
        ]
    if plan.goal is Goal.LORA:
        imports.insert(0, "import peft")
    standard_imports = ["import fnmatch", "import os"] if layout.tensor > 1 else ["import os"]
    memprof_imports = ["", "import memprof"] if spec.fixes else []
    lines = [
        *build_environment_lines(spec, *standard_imports), *imports, *from_imports, *memprof_imports, "",
        'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))',
        'dist.init_process_group("nccl")',
        f'mesh = init_device_mesh("cuda", {tuple(mesh_shape.values())}, mesh_dim_names={tuple(mesh_shape)})',
        f"micro_batch, accumulation, length = {spec.batch_size}, {candidate.accumulation}, {spec.context_length}",
        "",
        *_build_model_lines(candidate, spec, model),
    ]  # fmt: skip
    if layout.tensor > 1:
        lines.append(TENSOR_PARALLEL_STYLES)
    if layout.sharded:
        lines += _build_sharding_lines(candidate, spec)
    lines.append('model.to("cuda")')
    model_name = "model" if layout.sharded or layout.data == 1 else "wrapped"
    if model_name == "wrapped":
        lines.append("wrapped = torch.nn.parallel.DistributedDataParallel(")
        lines.append(
            '    model, device_ids=[torch.cuda.current_device()], process_group=mesh["replicate"].get_group())'
        )
    lines += [
        *build_apply_lines(spec.fixes),
        "groups = {}  # an optimizer's operators take parameters of one mesh",
        "for parameter in model.parameters():",
        "    if parameter.requires_grad:",
        '        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)',
        'optimizer = torch.optim.AdamW([{"params": group} for group in groups.values()], lr=1e-4, fused=True)',
        *_build_batch_lines(),
        "model.train()",
        "data = batches()",
        "for step in range(2):",
        "    for micro in range(accumulation):",
    ]
    if model_name == "wrapped":
        lines.append("        wrapped.require_backward_grad_sync = micro == accumulation - 1")
    if spec.amp and not layout.sharded:
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


def _build_sharding_lines(candidate: Candidate, spec: TargetSpec) -> list[str]:
    layout = candidate.parallel_plan
    names = '"replicate", "shard"' if layout.replicate > 1 else '"shard"'
    lines = [f"sharding = dict(mesh=mesh[{names}])"]
    if spec.amp:
        lines.append(
            f'sharding["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.{spec.amp}, reduce_dtype=torch.float32)'
        )
    if not layout.reshard:
        lines.append('sharding["reshard_after_forward"] = False')
    return [
        *lines,
        "lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]",
        "for layer in max(lists, key=len):",
        "    fully_shard(layer, **sharding)",
        "fully_shard(model, **sharding)",
    ]


def build_accelerate_yaml(candidate: Candidate) -> str:
    """Return `accelerate.yaml`, in the format of `accelerate config`."""
    layout = candidate.parallel_plan
    mixed = (
        {"bfloat16": "bf16", "float16": "fp16"}[candidate.plan.half] if candidate.plan.precision == "amp" else "'no'"
    )
    lines = ["compute_environment: LOCAL_MACHINE"]
    if layout.sharded:
        lines += [
            "distributed_type: FSDP",
            "fsdp_config:",
            "  fsdp_version: 2",
            "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
            f"  fsdp_reshard_after_forward: {str(layout.reshard).lower()}",
            "  fsdp_cpu_ram_efficient_loading: false",
            "  fsdp_state_dict_type: SHARDED_STATE_DICT",
        ]
    else:
        lines.append("distributed_type: MULTI_GPU")
    lines += [f"mixed_precision: {mixed}", "num_machines: 1", f"num_processes: {layout.size}", "machine_rank: 0"]
    return "\n".join(lines) + "\n"


def build_accelerate_script(candidate: Candidate, spec: TargetSpec, model: LoadedModel) -> str:
    """Return `train_accelerate.py`, a training script with accelerate."""
    imports = ["import accelerate", "import torch", "import transformers"]
    if candidate.plan.goal is Goal.LORA:
        imports.insert(1, "import peft")
    lines = [
        *build_environment_lines(spec), *imports, *(["", "import memprof"] if spec.fixes else []), "",
        f"micro_batch, accumulation, length = {spec.batch_size}, {candidate.accumulation}, {spec.context_length}",
        "accelerator = accelerate.Accelerator(gradient_accumulation_steps=accumulation)",
        *_build_model_lines(candidate, spec, model),
        "optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)",
        "model, optimizer = accelerator.prepare(model, optimizer)",
        *build_apply_lines(spec.fixes, "accelerator.unwrap_model(model)"),
        *_build_batch_lines(),
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


def build_torchtitan_toml(candidate: Candidate, spec: TargetSpec, name: str, flavor: str) -> str:
    """Return `train.toml` of torchtitan 0.2 (torchtitan/config/job_config.py)."""
    layout = candidate.parallel_plan
    is_checkpointed = candidate.plan.activations is Activations.CHECKPOINTED
    dtype = "bfloat16" if candidate.plan.precision == "half" else "float32"
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
global_batch_size = {spec.batch_size * candidate.accumulation * layout.data}
seq_len = {spec.context_length}
steps = 2
dataset = "c4"
dtype = "{dtype}"
mixed_precision_param = "{candidate.plan.half}"
mixed_precision_reduce = "{dtype}"

[parallelism]
data_parallel_replicate_degree = {layout.replicate}
data_parallel_shard_degree = {layout.shard}
fsdp_reshard_after_forward = "{"default" if layout.reshard else "never"}"
tensor_parallel_degree = {layout.tensor}

[activation_checkpoint]
mode = "{"full" if is_checkpointed else "none"}"
"""


def _build_device_map_script(spec: TargetSpec, model: LoadedModel) -> str:
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
    load_lines = _build_load_lines(spec, model, 'device_map="auto"')
    return (
        "\n".join([*build_environment_lines(spec), *imports, "", *load_lines, *placed, *_build_inference_lines(spec)])
        + "\n"
    )


def _build_tensor_parallel_script(spec: TargetSpec, model: LoadedModel) -> str:
    """Return `infer_tp.py`: inference with tensor parallelism, one rank per GPU."""
    lines = [
        *build_environment_lines(spec, "import fnmatch", "import os"),
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
        *_build_load_lines(spec, model),
        TENSOR_PARALLEL_STYLES,
        'model.to("cuda")',
        "torch.manual_seed(0)  # all ranks are given the same prompt",
        *_build_inference_lines(spec),
        "dist.destroy_process_group()",
    ]
    return "\n".join(lines) + "\n"


def _build_inference_lines(spec: TargetSpec) -> list[str]:
    return [
        "model.eval()",
        f"batch, length = {spec.batch_size}, {spec.context_length}",
        'prompt = torch.randint(model.config.vocab_size, (batch, length), device="cuda")  # yours',
        *build_generate_lines(spec),
    ]
