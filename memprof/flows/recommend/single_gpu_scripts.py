"""Scripts to paste for one GPU: with plain PyTorch, and with transformers' Trainer."""

from __future__ import annotations

import json
import pprint
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from memprof.device.catalog import find_gpu
from memprof.flows.recommend.plans import CHECKPOINTING, CPU_OPTIMIZER, Activations, Goal, Plan
from memprof.spec import DEFAULT_LORA_RANK, TargetSpec
from memprof.workload.catalog import ModelEntry, find_model, has_model, resolve_size

# Models that take tokens; other models get no script.
_AUTO_CLASS_BY_TASK = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
}
# Suffixes of the class names of such models, and of Auto classes.
_TOKEN_CLASS_SUFFIXES = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The model of a script: class, and repository or configuration."""

    auto_class: str
    from_pretrained: str  # argument of from_pretrained; empty: no weights to load
    from_config: str = ""  # expression of the configuration, without weights


def build_scripts(plan: Plan, spec: TargetSpec, accumulation: int) -> dict[str, str]:
    """Return scripts by kind, "pytorch" and "transformers"; empty for models from the user's code or without tokens.

    `spec` is the run of `plan`; a step has `accumulation` micro-batches.
    """
    model = describe_loaded_model(spec)
    if model is None:
        return {}
    if plan.goal is Goal.INFER:
        return {"pytorch": _build_inference_script(plan, spec, model)}
    return {
        "pytorch": _build_pytorch_script(plan, spec, model, accumulation),
        "transformers": _build_trainer_script(plan, spec, model, accumulation),
    }


# -- parts of a script ------------------------------------------------------------------------------------------------


def describe_loaded_model(spec: TargetSpec) -> LoadedModel | None:
    """Return the model of `spec` for a script; None for models from the user's code, or that take no tokens."""
    if spec.model_is_size:
        entry = resolve_size(spec.model)
        return _describe_catalog_model(entry, entry.hf_id)
    if has_model(spec.model):
        entry = find_model(spec.model)
        return _describe_catalog_model(entry, entry.resolve_alias(spec.model)[1])
    if spec.model.rpartition(":")[2].isidentifier() and ":" in spec.model:
        return None
    path = Path(spec.model).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        return LoadedModel("AutoModelForCausalLM", spec.model)
    config = json.loads(file.read_text(encoding="utf-8"))
    names = config.get("architectures") or ["AutoModelForCausalLM"]
    trust = ""
    if spec.trust_remote_code and "auto_map" in config:
        names, trust = [name for name in config["auto_map"] if name.startswith("AutoModel")], ", trust_remote_code=True"
    if not str(names[0]).endswith(_TOKEN_CLASS_SUFFIXES) or "Whisper" in str(names[0]):
        return None
    if path.is_dir() and any((*path.glob("*.safetensors"), *path.glob("*.bin"))):
        return LoadedModel(str(names[0]), str(path))
    return LoadedModel(str(names[0]), "", f"transformers.AutoConfig.from_pretrained({str(path)!r}{trust})")


def _describe_catalog_model(entry: ModelEntry, repository: str) -> LoadedModel | None:
    class_name = _AUTO_CLASS_BY_TASK.get(entry.task)
    if class_name is None:
        return None
    if not entry.synthesized:
        return LoadedModel(class_name, repository)
    config = pprint.pformat(entry.load_config(), width=100, sort_dicts=False)
    return LoadedModel(class_name, "", f"transformers.AutoConfig.for_model(**{config})")


def build_environment_lines(spec: TargetSpec, *imports: str) -> list[str]:
    """Return the first lines of a script: imports of the standard library, and the allocator's settings."""
    lines = [*imports, *(["import os"] if spec.alloc_conf and "import os" not in imports else [])]
    lines += [""] if lines else []
    if spec.alloc_conf:
        lines += [f'os.environ["PYTORCH_CUDA_ALLOC_CONF"] = {spec.alloc_conf!r}  # before torch', ""]
    return lines


def build_load_arguments(spec: TargetSpec) -> list[str]:
    """Return the arguments of from_pretrained or from_config."""
    arguments = [f"dtype=torch.{spec.dtype or 'float32'}"]
    if spec.attention is not None:
        arguments.append(f'attn_implementation="{spec.attention}"')
    if spec.trust_remote_code:
        arguments.append("trust_remote_code=True")
    return arguments


def build_model_lines(model: LoadedModel, arguments: list[str]) -> list[str]:
    """Return the lines that build a model from its configuration."""
    constructor = "from_config" if model.auto_class.startswith("Auto") else "_from_config"
    call = f"transformers.{model.auto_class}.{constructor}({', '.join(['config', *arguments])})"
    return [f"config = {model.from_config}", f"model = {call}"]


def build_lora_lines(spec: TargetSpec) -> list[str]:
    """Return the lines that add a LoRA adapter to the model."""
    rank = spec.lora_rank or DEFAULT_LORA_RANK
    target_argument = ""
    if spec.lora_targets is not None:
        module_names = [name.strip() for name in spec.lora_targets.split(",")]
        target_argument = f", target_modules={module_names if module_names != ['all-linear'] else 'all-linear'!r}"
    return [
        f'lora = peft.LoraConfig(task_type="CAUSAL_LM", r={rank}, lora_alpha={2 * rank}, '
        f"lora_dropout={spec.lora_dropout}{target_argument})",
        "model = peft.get_peft_model(model, lora)",
    ]


def build_apply_lines(fixes: Sequence[str], model_expression: str = "model") -> list[str]:
    """Return the line that applies `fixes` to the model in variable `model_expression`; empty without fixes."""
    quoted_names = ", ".join(f'"{name}"' for name in fixes)
    assignment = "applied = " if CPU_OPTIMIZER in fixes else ""
    return [f"{assignment}memprof.apply({model_expression}, [{quoted_names}], undoable=False)"] if fixes else []


def build_generate_lines(spec: TargetSpec) -> list[str]:
    """Return the lines that run a prompt through the model."""
    arguments = f"max_new_tokens={spec.new_tokens}, do_sample=False"
    call = f"model.generate(prompt, {arguments})" if spec.new_tokens else "model(prompt).logits"
    return ["with torch.no_grad():", f"    output = {call}", "print(output.shape)"]


def _build_head_lines(spec: TargetSpec, imports: list[str], fixes: Sequence[str]) -> list[str]:
    memprof_import = ["import memprof", ""] if fixes else []
    kind = find_gpu(spec.gpu).device_type if spec.gpu_vram_bytes is None else "cuda"
    device = f'device = "{kind}" if torch.{kind}.is_available() else "cpu"'
    return [*build_environment_lines(spec), *sorted(imports), "", *memprof_import, device]


def _build_load_lines(plan: Plan, spec: TargetSpec, model: LoadedModel) -> list[str]:
    arguments = build_load_arguments(spec)
    model_lines = [] if model.from_pretrained else build_model_lines(model, arguments)
    lines: list[str] = []
    is_quantized = plan.precision in ("int8", "nf4")
    if is_quantized:
        options = (
            "load_in_8bit=True"
            if plan.precision == "int8"
            else 'load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, '
            f"bnb_4bit_compute_dtype=torch.{spec.amp or spec.dtype}"
        )
        lines.append(f"quantization = transformers.BitsAndBytesConfig({options})")
        arguments += ["quantization_config=quantization", 'device_map={"": 0}']
    lines += model_lines
    load_call = f"transformers.{model.auto_class}.from_pretrained({model.from_pretrained!r},"
    if not model.from_pretrained:
        # bitsandbytes quantizes weights only while they are loaded.
        load_call = "type(model).from_pretrained(None, config=config, state_dict=model.state_dict(),"
    if model.from_pretrained or is_quantized:
        lines += [f"model = {load_call}", f"    {', '.join(arguments)})"]
    if plan.goal is Goal.QLORA:
        lines.append("model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)")
    if plan.goal in (Goal.LORA, Goal.QLORA):
        lines += build_lora_lines(spec)
    return lines if is_quantized else [*lines, "model.to(device)"]


def _build_import_lines(plan: Plan) -> list[str]:
    names = ["torch", "transformers"]
    if plan.goal in (Goal.LORA, Goal.QLORA):
        names.append("peft")
    library = {"adamw-8bit": "bitsandbytes", "torchao-adamw-8bit": "torchao.optim"}.get(plan.optimizer)
    return [f"import {name}" for name in (*names, library) if name]


def _build_optimizer_lines(plan: Plan) -> list[str]:
    if plan.optimizer == "adamw-cpu":
        return [f'optimizer = applied.results["{CPU_OPTIMIZER}"]']
    optimizer_call = {
        "adamw": "torch.optim.AdamW(trained, lr=1e-4, fused=True)",
        "adamw-8bit": "bitsandbytes.optim.AdamW8bit(trained, lr=1e-4)",
        "torchao-adamw-8bit": "torchao.optim.AdamW8bit(trained, lr=1e-4)",
    }[plan.optimizer]
    return [
        "trained = [parameter for parameter in model.parameters() if parameter.requires_grad]",
        f"optimizer = {optimizer_call}",
    ]


def _build_pytorch_script(plan: Plan, spec: TargetSpec, model: LoadedModel, accumulation: int) -> str:
    scales_loss = spec.amp == "float16"
    lines = [
        *_build_head_lines(spec, _build_import_lines(plan), spec.fixes),
        f"micro_batch, accumulation, length = {spec.batch_size}, {accumulation}, {spec.context_length}",
        "",
        *_build_load_lines(plan, spec, model),
        *build_apply_lines(spec.fixes),
        *_build_optimizer_lines(plan),
        *(['scaler = torch.amp.GradScaler(device, enabled=device == "cuda")'] if scales_loss else []),
        "",
        "",
        "def batches():  # yours",
        "    while True:",
        "        ids = torch.randint(model.config.vocab_size, (micro_batch, length))",
        '        yield {"input_ids": ids, "labels": ids.clone()}',
        "",
        "",
        "model.config.use_cache = False",
        "model.train()",
        "data = batches()",
        "for step in range(2):",
        "    for _ in range(accumulation):",
        "        batch = {name: tensor.to(device) for name, tensor in next(data).items()}",
    ]
    if spec.amp:
        lines.append(f"        with torch.autocast(device, dtype=torch.{spec.amp}):")
        lines.append("            loss = model(**batch).loss / accumulation")
    else:
        lines.append("        loss = model(**batch).loss / accumulation")
    if scales_loss:
        lines += ["        scaler.scale(loss).backward()", "    scaler.step(optimizer)", "    scaler.update()"]
    else:
        lines += ["        loss.backward()", "    optimizer.step()"]
    lines += ["    optimizer.zero_grad()", "    print(step, loss.item() * accumulation)"]
    return "\n".join(lines) + "\n"


def _build_trainer_script(plan: Plan, spec: TargetSpec, model: LoadedModel, accumulation: int) -> str:
    # Trainer has its own argument for checkpointing.
    trainer_fix = CHECKPOINTING if plan.activations is Activations.CHECKPOINTED else ""
    fixes = [name for name in spec.fixes if name != trainer_fix]
    trainer_optimizer = {"adamw": "adamw_torch_fused", "adamw-8bit": "adamw_bnb_8bit"}.get(plan.optimizer)
    arguments = [
        'output_dir="out"',
        f"per_device_train_batch_size={spec.batch_size}",
        f"gradient_accumulation_steps={accumulation}",
        "learning_rate=1e-4",
        "max_steps=2",
        'report_to="none"',
        'use_cpu=device == "cpu"',
    ]
    if spec.amp:
        arguments.append("bf16=True" if spec.amp == "bfloat16" else "fp16=torch.cuda.is_available()")
    if trainer_fix:
        arguments.append("gradient_checkpointing=True")
    if trainer_optimizer is not None:
        arguments.append(f'optim="{trainer_optimizer}"')
    imports = [line for line in _build_import_lines(plan) if line != "import bitsandbytes"]
    lines = [
        *_build_head_lines(spec, imports, fixes),
        "",
        *_build_load_lines(plan, spec, model),
        *build_apply_lines(fixes),
        *([] if trainer_optimizer is not None else _build_optimizer_lines(plan)),
        f"count, length = {2 * spec.batch_size * accumulation}, {spec.context_length}",
        "rows = torch.randint(model.config.vocab_size, (count, length))  # yours",
        'dataset = [{"input_ids": row, "labels": row} for row in rows]',
        "arguments = transformers.TrainingArguments(",
        *(f"    {argument}," for argument in arguments),
        ")",
        "trainer = transformers.Trainer("
        + ("" if trainer_optimizer is not None else "optimizers=(optimizer, None), ")
        + "model=model, args=arguments, train_dataset=dataset)",
        "trainer.train()",
    ]
    return "\n".join(lines) + "\n"


def _build_inference_script(plan: Plan, spec: TargetSpec, model: LoadedModel) -> str:
    lines = [
        *_build_head_lines(spec, _build_import_lines(plan), spec.fixes),
        f"batch, length = {spec.batch_size}, {spec.context_length}",
        "",
        *_build_load_lines(plan, spec, model),
        "model.eval()",
        "prompt = torch.randint(model.config.vocab_size, (batch, length), device=device)  # yours",
        *build_generate_lines(spec),
    ]
    return "\n".join(lines) + "\n"
