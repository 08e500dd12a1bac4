"""The training or inference loop: plain PyTorch, as people write it, with its phases recorded."""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from memprof.errors import UsageError
from memprof.spec import Mode, TargetSpec
from memprof.trace.events import PhaseKind
from memprof.workload import adapters, generate, npt_layers, quantization
from memprof.workload.device import Device
from memprof.workload.inputs import Feeder
from memprof.workload.layers import find_layers
from memprof.workload.lengths import parse_lengths
from memprof.workload.loss import compute_loss
from memprof.workload.models import ModelSource
from memprof.workload.optimizers import make_optimizer, require_optimizer
from memprof.workload.plan import check_plan, parse_plan
from memprof.workload.rng import seed_rngs

if TYPE_CHECKING:
    from memprof.workload.spread import RankPlacement
    from memprof.workload.stages import Pipeline

PlaceModel = Callable[[nn.Module], object]
# Applies a spec's fixes to a model in host memory, and moves it to a device; returns an optimizer if a fix creates
# one. The caller passes this function in, because memprof.fixes imports this package.
ApplyFixes = Callable[
    [nn.Module, TargetSpec, Callable[[list[nn.Parameter]], "torch.optim.Optimizer | None"], str, PlaceModel | None], Any
]


class Workload:
    """One run of `spec` with the model `source`: builds the model, then runs its training or inference steps.
    `apply_fixes` is needed if `spec` has fixes. Raises UsageError if a library that `spec` needs is not installed."""

    def __init__(self, spec: TargetSpec, source: ModelSource, apply_fixes: ApplyFixes | None = None) -> None:
        self.spec = spec
        self._apply_fixes = apply_fixes
        self.source = source
        self.num_parameters = 0
        self.num_trainable_parameters = 0
        # Kept beyond the run: its state is no part of what the last stage frees.
        self._optimizer: torch.optim.Optimizer | None = None
        self.sequence_lengths: list[int] = []
        self._lengths = None if spec.lengths is None else parse_lengths(spec.lengths)
        if source.stored is not None:
            quantization.import_required("accelerate")  # by which transformers loads quantized weights
            if source.stored.is_bitsandbytes:
                quantization.import_required("bitsandbytes.optim")
        if spec.adapter is not None:
            adapters.require_peft()
        if spec.mode is Mode.TRAIN:
            require_optimizer(spec.optimizer)
        self.context_length: int | None = None
        self.dtype: str | None = source.dtype
        self._placement: RankPlacement | None = None
        self._pipeline: Pipeline | None = None
        if spec.parallel is not None:
            from memprof.workload.spread import RankPlacement  # and torch's distributed packages with it

            plan = parse_plan(spec.parallel, spec.gpus)
            check_plan(plan, spec, source.task, source.config)
            self._placement = RankPlacement(plan, spec.rank or 0, spec)

    def run(
        self,
        device: Device,
        progress: Callable[[str], None] = lambda doing: None,
        building: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        """Build the model inside the context `building()`, and run every step on `device`; `progress` gets messages.
        Raises UsageError if the model cannot be built, or its inputs are not known."""
        with contextlib.ExitStack() as stack:
            if self.source.task != "custom":
                stack.enter_context(quiet_transformers())
            if self._placement is not None:  # torch warns of the model's output, a view, which nothing here changes
                stack.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
            if self.spec.sdpa_backend is not None:
                stack.enter_context(sdpa_kernel(_SDPA_BACKENDS[self.spec.sdpa_backend]))
            self._build_and_run(device, progress, building)

    def _build_and_run(
        self, device: Device, progress: Callable[[str], None], building: Callable[[], AbstractContextManager[object]]
    ) -> None:
        spec = self.spec
        for note in (*self.source.notes, *quantization.list_assumptions(self.source.stored, spec)):
            device.assume(note)
        progress("building the model")
        if self._placement is not None:
            self._placement.join()
        with device.phase(PhaseKind.MODEL):
            model, base = self._build_model(device.name, building)
        device.adopt(model if self._placement is None else self._placement.get_wrapper(model))
        if spec.compile:
            for unit in [unit for _, unit in find_layers(base, "--compile-layers")] if spec.compile_layers else [model]:
                unit.compile(mode=spec.compile_mode)
        for sentence in quantization.list_unpacking_notes(self.source.stored, model):
            device.assume(sentence)
        if self.dtype is None:
            first_dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
            self.dtype = None if first_dtype is None else str(first_dtype).removeprefix("torch.")
        feeder = Feeder(self.source, base, spec.batch_size, spec.context_length, self._lengths)
        self.sequence_lengths = feeder.sequence_lengths
        self.context_length = feeder.context_length if feeder.takes_tokens else None
        if self._placement is not None and self._placement.plan.stages > 1:
            self._pipeline = self._placement.make_pipeline(
                model, base, (spec.batch_size, feeder.context_length), device
            )
        if spec.dataset_batches is not None:
            with device.phase(PhaseKind.INPUTS):
                feeder.build_dataset(spec.dataset_batches)
        seed_rngs()
        self._run_steps(device, model, base, feeder, progress)
        if feeder.sequence_lengths:
            self.context_length = max(feeder.sequence_lengths)
        for sentence in feeder.assumptions:
            device.assume(sentence)

    def _run_steps(
        self, device: Device, model: nn.Module, base: nn.Module, feeder: Feeder, progress: Callable[[str], None]
    ) -> None:
        spec = self.spec
        if spec.mode is Mode.INFERENCE:
            model.eval()
            for step in range(1, spec.steps + 1):
                progress(f"forward {step} of {spec.steps}")
                for micro_batch in range(1, spec.gradient_accumulation + 1):
                    self._run_inference(device, model, base, feeder, (step, micro_batch))
        else:
            model.train()
            self._prepare_training(device, model, base)
            with device.phase(PhaseKind.OPTIMIZER):
                trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
                groups = trainable if self._placement is None else self._placement.group_parameters(trainable)
                optimizer = self._optimizer = self._optimizer or make_optimizer(groups, spec)
                # Disabled, a scaler passes everything through. With its usual scale gradients of random weights
                # overflow, and it would leave out the steps that are profiled: no optimizer would have any state.
                scaler = torch.amp.GradScaler(device.name, init_scale=1.0, enabled=spec.amp == "float16")
            for step in range(1, spec.steps + 1):
                progress(f"training step {step} of {spec.steps}")
                if self._pipeline is not None:
                    self._run_pipeline(device, feeder, step)
                else:
                    for micro_batch in range(1, spec.gradient_accumulation + 1):
                        self._run_micro_batch(device, model, feeder, scaler, step, micro_batch)
                if optimizer is not None:
                    with device.phase(PhaseKind.OPTIMIZER_STEP, step):
                        scaler.step(optimizer)
                        scaler.update()
                with device.phase(PhaseKind.ZERO_GRAD, step):
                    model.zero_grad(set_to_none=spec.zero_grad == "none")
                if spec.evaluate:
                    self._evaluate(device, model, feeder, step)

    def _build_model(
        self, device: str, building: Callable[[], AbstractContextManager[object]]
    ) -> tuple[nn.Module, nn.Module]:
        """Return (the module to call, the bare model); they differ where an adapter wraps the model."""
        if self.spec.adapter is not None:
            adapters.check_targets(self.spec, self.source)
        # Built in host memory and moved, as scripts do (and as from_pretrained has it, tied weights are made once).
        with building():
            model = self.source.build()
        if self.source.task == "custom" and self.source.dtype is not None:
            model = model.to(getattr(torch, self.source.dtype))
        if self.spec.npt is not None:
            npt_layers.add_npt(model, self.spec)
        if self.spec.freeze is not None:
            for parameter in adapters.match_parameters(model, self.spec.freeze, "--freeze names no parameter"):
                parameter.requires_grad_(False)
        wrapped = model if self.spec.adapter is None else adapters.add_lora(model, self.spec, self.source)
        self.num_parameters = quantization.count_parameters(wrapped)
        self.num_trainable_parameters = sum(p.numel() for p in wrapped.parameters() if p.requires_grad)
        placement = self._placement
        if placement is not None and placement.plan.stages > 1:
            wrapped = placement.make_stage(wrapped)
        place_model = None if placement is None else functools.partial(placement.place_model, device=device)
        if self.spec.fixes and self._apply_fixes is not None:
            # An adapter's parameters are in the model; what wraps it has none of its own.
            factory = functools.partial(make_optimizer, spec=self.spec)
            fixed_module = wrapped if placement is not None and placement.plan.stages > 1 else model
            self._optimizer = self._apply_fixes(fixed_module, self.spec, factory, device, place_model)
        elif place_model is not None:
            place_model(wrapped)
        elif self.source.stored is None:  # else it is on the GPU already
            wrapped = wrapped.to(device)
        return wrapped, model

    def _prepare_training(self, device: Device, model: nn.Module, base: nn.Module) -> None:
        if not self.num_trainable_parameters:
            hint = "leave some parameter its requires_grad, or profile the forward alone with --mode inference"
            raise UsageError("nothing is trained: every parameter is frozen", value=self.source.name, hint=hint)
        config = getattr(base, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # type: ignore[union-attr]
            device.assume("No KV cache in training (config.use_cache = False, as transformers' Trainer sets it).")
        if not self.spec.activation_checkpointing:
            return
        enable = getattr(base, "activation_checkpointing_enable", None)
        enable = enable or getattr(base, "gradient_checkpointing_enable", None)
        if enable is None:
            hint = "the model has no activation_checkpointing_enable(); call torch.utils.checkpoint in its forward"
            raise UsageError("--activation-checkpointing does not apply", value=type(base).__name__, hint=hint)
        try:
            enable()
        except ValueError as error:
            raise UsageError("the model has no activation checkpointing", value=str(error)) from None
        if self.spec.adapter is not None or self.spec.npt is not None:
            adapters.enable_input_gradients(base)

    def _run_micro_batch(
        self,
        device: Device,
        model: nn.Module,
        feeder: Feeder,
        scaler: torch.amp.GradScaler,
        step: int,
        micro_batch: int,
    ) -> None:
        """Run forward and backward of one micro-batch; only the gradients remain afterwards."""
        with device.phase(PhaseKind.INPUTS, step, micro_batch):
            batch = _move_batch(feeder.host_batch(), device.name)
        is_last = micro_batch == self.spec.gradient_accumulation
        with contextlib.ExitStack() as stack:
            if self._placement is not None:
                model = self._placement.get_wrapper(model)
                stack.enter_context(self._placement.gradient_sync(is_last))
                batch = self._shard_batch(device, stack, batch, step, micro_batch)
            with device.phase(PhaseKind.FORWARD, step, micro_batch), self._autocast(device.name):
                outputs = model(**batch)
                loss = compute_loss(outputs, batch, self.source, feeder.assumptions.append)
                if self.spec.gradient_accumulation > 1:
                    loss = loss / self.spec.gradient_accumulation
            with device.phase(PhaseKind.BACKWARD, step, micro_batch):
                scaler.scale(loss).backward()
        if step == 1 and micro_batch == 1:
            device.assume("The model's output is kept until its backward is done, as in a plain training loop.")

    def _shard_batch(
        self, device: Device, stack: contextlib.ExitStack, batch: dict[str, Any], step: int, micro_batch: int
    ) -> dict[str, Any]:
        """Return this rank's part of the sequences in `batch`; valid until `stack` is closed."""
        if self._placement is None or self._placement.plan.sequence == 1:
            return batch
        with device.phase(PhaseKind.INPUTS, step, micro_batch):
            return stack.enter_context(self._placement.shard_batch(batch))

    def _run_pipeline(self, device: Device, feeder: Feeder, step: int) -> None:
        """Run all micro-batches forward and backward, in the order of the pipeline's schedule."""
        assert self._pipeline is not None and self._placement is not None
        with device.phase(PhaseKind.INPUTS, step):
            batches = [feeder.host_batch() for _ in range(self._placement.plan.microbatches)]
            batch = {name: torch.cat([b[name] for b in batches]).to(device.name) for name in ("input_ids", "labels")}
        with self._autocast(device.name):
            self._pipeline.step(step, batch["input_ids"], batch["labels"])

    def _evaluate(self, device: Device, model: nn.Module, feeder: Feeder, step: int) -> None:
        """Run one batch of a validation loop; outputs and loss are freed at the end."""
        model.eval()
        with device.phase(PhaseKind.EVALUATION, step):
            batch = _move_batch(feeder.host_batch(), device.name)
            with contextlib.ExitStack() as stack:
                batch = self._shard_batch(device, stack, batch, step, 1)
                with torch.no_grad(), self._autocast(device.name):
                    outputs = model(**batch)
                    loss = compute_loss(outputs, batch, self.source, feeder.assumptions.append)
                # A validation loop sums losses as Python numbers.
                loss.item()
                del batch, outputs, loss
        model.train()

    def _autocast(self, device: str) -> AbstractContextManager[object]:
        if self.spec.amp is None or (self._placement is not None and not self._placement.uses_autocast):
            return contextlib.nullcontext()
        return torch.autocast(device, dtype=getattr(torch, self.spec.amp))

    def _run_inference(
        self, device: Device, model: nn.Module, base: nn.Module, feeder: Feeder, indices: tuple[int, int]
    ) -> None:
        """Run one forward, or one prompt and its decode steps; `indices` is (step, micro-batch), both from 1."""
        task = self.source.task
        with device.phase(PhaseKind.INPUTS, *indices):
            batch = _move_batch(feeder.host_batch(), device.name)
            if task not in ("seq2seq-lm", "speech-seq2seq"):
                batch.pop("labels", None)
        if self.spec.new_tokens:
            with torch.no_grad(), self._autocast(device.name):
                generate.generate(device, model, base, batch, self.spec.new_tokens, indices)
            return
        with contextlib.ExitStack() as stack:
            batch = self._shard_batch(device, stack, batch, *indices)
            with device.phase(PhaseKind.FORWARD, *indices), torch.no_grad(), self._autocast(device.name):
                outputs = model(**batch)
            del outputs


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Context manager: silence messages that transformers and bitsandbytes log while a model is built and run."""
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    bars_enabled = transformers_logging.is_progress_bar_enabled()
    bitsandbytes_logger = logging.getLogger("bitsandbytes")
    level = bitsandbytes_logger.level
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    bitsandbytes_logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars_enabled:
            transformers_logging.enable_progress_bar()
        bitsandbytes_logger.setLevel(level)


def _move_batch(batch: dict[str, Any], device: str) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


_SDPA_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
