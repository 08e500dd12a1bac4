"""The code to paste for a training over cards: plain PyTorch, accelerate and torchtitan, each with its launch line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memprof.catalog import find_model, has_model, resolve_size
from memprof.flows.recommend.plans import Activations, Goal
from memprof.flows.recommend.snippet import LoadedModel, loaded_model
from memprof.spec import DEFAULT_LORA_RANK, TargetSpec
from memprof.units import format_bytes

if TYPE_CHECKING:
    from memprof.flows.recommend.over_cards import OverCards
    from memprof.flows.recommend.search import Tried
    from memprof.flows.recommend.ways import Way

FULLY_SHARD, ACCELERATE, ACCELERATE_YAML, TORCHTITAN = "fully-shard", "accelerate", "accelerate-yaml", "torchtitan"
_CARDS_OF_A_MACHINE = 8

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

_TITAN = {
    "llama-3.1-8b": ("llama3", "8B"), "llama-3.1-70b": ("llama3", "70B"), "llama-3.1-405b": ("llama3", "405B"),
    "qwen3-8b": ("qwen3", "8B"), "qwen3-14b": ("qwen3", "14B"), "qwen3-32b": ("qwen3", "32B"),
}  # fmt: skip
"""Models of torchtitan 0.2, the last with configurations in TOML (torchtitan/models/*/__init__.py of v0.2.2).
Not those whose head is the embedding: fully_shard of torch 2.13 refuses how it shards the two."""


@dataclass(frozen=True, slots=True)
class Scripts:
    """By kind: texts, the lines that start them, and for what they are written, where that is not what was chosen."""

    texts: dict[str, str] = field(default_factory=dict)
    launch: dict[str, str] = field(default_factory=dict)
    written_for: dict[str, str] = field(default_factory=dict)


def scripts(search: OverCards, found: tuple[Way, Tried], spec: TargetSpec) -> Scripts:
    """Of what was chosen, and for a library of the best that fits and that it can do; none for a model of the user's
    own."""
    model = loaded_model(spec)
    if model is None:
        return Scripts()
    way, tried = found
    written_for: dict[str, str] = {}
    texts = {FULLY_SHARD: fully_shard_script(way, tried.outcome.spec, model)}
    launch = {FULLY_SHARD: _torchrun(way, "train.py")}
    fitting = [(way, tried)] + [
        pair for pair in sorted(search.tried.items(), key=lambda pair: search.rank(pair[1]))
        if pair[1].outcome.fits and pair[0].spread.size == way.spread.size
    ]  # fmt: skip
    for of, run in fitting:
        # It shards the head by itself, which a chunked loss cannot reach into.
        if not of.plan.chunked_loss and of.parallel in ("ddp", "fsdp", "fsdp:shard_grad_op"):
            texts[ACCELERATE_YAML] = accelerate_yaml(of)
            texts[ACCELERATE] = accelerate_script(of, run.outcome.spec, model)
            launch[ACCELERATE] = "accelerate launch --config_file accelerate.yaml train_accelerate.py"
            if of != way:
                written_for |= dict.fromkeys((ACCELERATE_YAML, ACCELERATE), _said(of, run, search))
            break
    name = resolve_size(spec.model).key if spec.model_is_size else spec.model
    name = find_model(name).key if has_model(name) else name
    if name in _TITAN:
        for of, run in fitting:
            if of.plan.goal is Goal.FULL and not of.plan.chunked_loss and of.plan.precision != "float32":
                texts[TORCHTITAN] = torchtitan_toml(of, run.outcome.spec, *_TITAN[name])
                launch[TORCHTITAN] = _torchrun(of, "-m torchtitan.train --job.config_file train.toml")
                if of != way:
                    written_for[TORCHTITAN] = _said(of, run, search)
                break
    return Scripts(texts, launch, written_for)


def _said(way: Way, tried: Tried, search: OverCards) -> str:
    verdict = "fits" if search.has_room(tried) else "fits only just"
    return f"{way.label()}; needs {format_bytes(tried.outcome.needed_bytes)}, {verdict}"


def _torchrun(way: Way, what: str) -> str:
    cards = way.spread.size
    machines = -(-cards // _CARDS_OF_A_MACHINE)
    nodes = f"--nnodes {machines} --rdzv-backend c10d --rdzv-endpoint HOST:29500 " if machines > 1 else ""
    return f"torchrun {nodes}--nproc-per-node {cards // machines} {what}"


def environment(spec: TargetSpec, *others: str) -> list[str]:
    """The first lines of a script: the standard library's modules, and the allocator's settings."""
    lines = [*others, "import os", ""]
    if spec.alloc_conf:
        lines += [f'os.environ["PYTORCH_CUDA_ALLOC_CONF"] = {spec.alloc_conf!r}  # before torch', ""]
    return lines


def loading(spec: TargetSpec, model: LoadedModel, *more: str) -> list[str]:
    """How the model is made in host memory; `more` are arguments of from_pretrained alone."""
    arguments = [f"dtype=torch.{spec.dtype or 'float32'}"]
    if spec.attention is not None:
        arguments.append(f'attn_implementation="{spec.attention}"')
    if spec.trust_remote_code:
        arguments.append("trust_remote_code=True")
    auto = f"transformers.{model.auto_class}"
    if model.from_pretrained:
        given = ", ".join([repr(model.from_pretrained), *arguments, *more])
        return [f"model = {auto}.from_pretrained({given})"]
    make = "_from_config" if not model.auto_class.startswith("Auto") else "from_config"
    return [f"config = {model.from_config}", f"model = {auto}.{make}({', '.join(['config', *arguments])})"]


def _built(way: Way, spec: TargetSpec, model: LoadedModel) -> list[str]:
    lines = loading(spec, model)
    lines.append("model.config.use_cache = False")
    if way.plan.goal is Goal.LORA:
        rank = spec.lora_rank or DEFAULT_LORA_RANK
        names = None if spec.lora_targets is None else [name.strip() for name in spec.lora_targets.split(",")]
        targets = "" if names is None else f", target_modules={names if names != ['all-linear'] else 'all-linear'!r}"
        lines += [
            f'lora = peft.LoraConfig(task_type="CAUSAL_LM", r={rank}, lora_alpha={2 * rank}, '
            f"lora_dropout={spec.lora_dropout}{targets})",
            "model = peft.get_peft_model(model, lora)",
        ]
    return lines


def _batches() -> list[str]:
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


def _applied(names: Iterable[str], model: str = "model") -> list[str]:
    listed = ", ".join(f'"{name}"' for name in names)
    return [f"memprof.apply({model}, [{listed}], undoable=False)"] if listed else []


def fully_shard_script(way: Way, spec: TargetSpec, model: LoadedModel) -> str:
    """`train.py`: what the workload of `memprof profile --parallel` does, as a script (workload/spread.py)."""
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
    standard = ["import fnmatch"] if spread.tensor > 1 else []
    lines = [
        *environment(spec, *standard), *imports, *tools, *(["", "import memprof"] if spec.fixes else []), "",
        'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))',
        'dist.init_process_group("nccl")',
        f'mesh = init_device_mesh("cuda", {tuple(shape.values())}, mesh_dim_names={tuple(shape)})',
        f"micro_batch, accumulation, length = {spec.batch_size}, {way.accumulation}, {spec.context_length}",
        "",
        *_built(way, spec, model),
    ]  # fmt: skip
    if spread.tensor > 1:
        lines.append(STYLES)
    called = "model"
    if spread.sharded:
        lines += _sharded(way, spec)
    lines.append('model.to("cuda")')
    if not spread.sharded and spread.data > 1:
        lines.append("wrapped = torch.nn.parallel.DistributedDataParallel(")
        lines.append(
            '    model, device_ids=[torch.cuda.current_device()], process_group=mesh["replicate"].get_group())'
        )
        called = "wrapped"
    lines += [
        *_applied(spec.fixes),
        "groups = {}  # an optimizer's operators take parameters of one mesh",
        "for parameter in model.parameters():",
        "    if parameter.requires_grad:",
        '        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)',
        'optimizer = torch.optim.AdamW([{"params": group} for group in groups.values()], lr=1e-4, fused=True)',
        *_batches(),
        "model.train()",
        "data = batches()",
        "for step in range(2):",
        "    for micro in range(accumulation):",
    ]
    if called == "wrapped":
        lines.append("        wrapped.require_backward_grad_sync = micro == accumulation - 1")
    if spec.amp and not spread.sharded:
        lines.append(f'        with torch.autocast("cuda", dtype=torch.{spec.amp}):')
        lines.append(f"            outputs = {called}(**next(data))")
    else:
        lines.append(f"        outputs = {called}(**next(data))")
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


def _sharded(way: Way, spec: TargetSpec) -> list[str]:
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
    """`accelerate.yaml`, as `accelerate config` writes it."""
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
    """`train_accelerate.py`."""
    imports = ["import accelerate", "import torch", "import transformers"]
    if way.plan.goal is Goal.LORA:
        imports.insert(1, "import peft")
    fixes = list(spec.fixes)
    before = environment(spec) if spec.alloc_conf else []
    lines = [
        *before, *imports, *(["", "import memprof"] if fixes else []), "",
        f"micro_batch, accumulation, length = {spec.batch_size}, {way.accumulation}, {spec.context_length}",
        "accelerator = accelerate.Accelerator(gradient_accumulation_steps=accumulation)",
        *_built(way, spec, model),
        "optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)",
        "model, optimizer = accelerator.prepare(model, optimizer)",
        *_applied(fixes, "accelerator.unwrap_model(model)"),
        *_batches(),
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
    """`train.toml` of torchtitan 0.2 (torchtitan/config/job_config.py)."""
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
