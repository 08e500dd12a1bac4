"""Distribution of a model over ranks by torch's own functions: DistributedDataParallel, fully_shard,
parallelize_module and context_parallel. stages.py has pipelines, ulysses.py sequence parallelism.

One rank runs the same code as a script for torchrun would run with its model.
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from memprof.errors import UsageError
from memprof.spec import Mode, TargetSpec
from memprof.torch_private import distributed
from memprof.workload import quantization
from memprof.workload.device import Device
from memprof.workload.layers import find_layers
from memprof.workload.plan import ParallelPlan
from memprof.workload.stages import ModelStage, Pipeline

_NAMES = ("stages", "replicate", "shard", "sequence", "tensor")
_STAY_WHOLE = frozenset({"replicate", "replicated_with_grad_allreduce"})
# Of gradients under FSDP's mixed precision, torchtitan's default (config/job_config.py, mixed_precision_reduce).
_AUTOCAST_REDUCES_IN = torch.float32


class Spread:
    """Rank `rank` (from 0) of those that `plan` lays out; UsageError if torch has no torch.distributed."""

    def __init__(self, plan: ParallelPlan, rank: int, spec: TargetSpec) -> None:
        if not dist.is_available():
            raise UsageError("this torch was built without torch.distributed", hint="install torch from PyPI")
        self.plan, self.rank, self._spec = plan, rank, spec
        self._mesh: Any = None
        self._ddp_wrapper: Any = None

    def join(self) -> None:
        """Join the process group, and create the device mesh."""
        from torch.distributed.device_mesh import init_device_mesh

        plan = self.plan
        if plan.layers > 1:
            return  # one process
        torch.cuda.set_device(self.rank % torch.cuda.device_count())
        dist.init_process_group("nccl", rank=self.rank, world_size=plan.size)
        shape = (plan.stages, plan.replicate, plan.shard, plan.sequence, plan.tensor)
        self._mesh = init_device_mesh("cuda", shape, mesh_dim_names=_NAMES)

    def _get_submesh(self, *names: str) -> Any:
        """Return the mesh of these dimensions; several are flattened to one."""
        return self._mesh[names[0]] if len(names) == 1 else self._mesh[names]._flatten("_".join(names))

    def cut(self, model: nn.Module) -> nn.Module:
        """Return this rank's stage of `model`."""
        return ModelStage(model, self._mesh["stages"].get_local_rank(), self.plan.stages)

    def pipeline(self, stage: nn.Module, model: Any, example: tuple[int, int], device: Device) -> Pipeline:
        """Return the schedule that runs `stage` of `model` on micro-batches of so many sequences and tokens."""
        return Pipeline(stage, model, self.plan, self._mesh["stages"], example, device)

    def place(self, model: nn.Module, device: str) -> None:
        """Put `model` from host memory on this rank's GPU as planned; UsageError if a part does not apply to it."""
        plan = self.plan
        if plan.layers > 1:
            _dispatch_layers(model)
            return
        if plan.tensor > 1:
            self._shard_tensors(model)
        if plan.sharded:
            self._shard(model)
        model.to(device)  # what fully_shard does not manage: frozen buffers, or everything
        if plan.sharded or plan.data * plan.sequence == 1 or self._spec.mode is Mode.INFERENCE:
            return
        # Ranks that share a sequence have parts of gradients, too.
        summed = self._get_submesh(
            *(name for name in ("replicate", "shard", "sequence") if self._mesh[name].size() > 1)
        )
        self._ddp_wrapper = nn.parallel.DistributedDataParallel(
            model, device_ids=[torch.cuda.current_device()], process_group=summed.get_group()
        )

    def _shard(self, model: nn.Module) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        plan = self.plan
        options: dict[str, Any] = {}
        inner = self._get_submesh("shard", "sequence") if plan.sequence > 1 else self._get_submesh("shard")
        if plan.replicate > 1:
            # Two directions of the mesh: replicas, and shards among them.
            if plan.sequence > 1:
                problem = "replicas of shards beside context parallelism are not here yet"
                raise UsageError(problem, value=f"--parallel {self._spec.parallel}", hint="fsdp in the place of hsdp")
            inner = self._mesh["replicate", "shard"]
        if self._spec.amp is not None:
            dtype = getattr(torch, self._spec.amp)
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=_AUTOCAST_REDUCES_IN)
        if not plan.reshard:
            options["reshard_after_forward"] = False  # else torch's choice: of layers, and not of the root
        layers = model.layers if isinstance(model, ModelStage) else [layer for _, layer in find_layers(model, "fsdp")]
        for layer in layers:
            fully_shard(layer, mesh=inner, **options)
        fully_shard(model, mesh=inner, **options)

    def _shard_tensors(self, model: Any) -> None:
        """Shard tensors over ranks by transformers' own plan for the architecture."""
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        styles: dict[str, Callable[[], Any]] = {
            "colwise": ColwiseParallel,
            "rowwise": RowwiseParallel,
            "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
            "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
            "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
            "vocab_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
        }
        tp_plan = getattr(model, "tp_plan", None) or {}
        architecture = getattr(model, "architecture", type(model).__name__)
        hint = f"--parallel fsdp={self.plan.size}"
        if not tp_plan:
            problem = "transformers has no tensor-parallel plan for this architecture"
            raise UsageError(problem, value=architecture, hint=hint)
        unknown = sorted(set(tp_plan.values()) - styles.keys() - _STAY_WHOLE)
        if unknown:
            problem = "a part of this architecture's tensor-parallel plan is not here yet"
            raise UsageError(problem, value=f"{architecture}: {unknown[0]}", hint=hint)
        found = {}
        for name, _ in model.named_modules():
            style = next((style for pattern, style in tp_plan.items() if fnmatch.fnmatch(name, pattern)), "")
            if style in styles:
                found[name] = styles[style]()
        parallelize_module(model, self._get_submesh("tensor"), found)

    def parameter_groups(self, parameters: list[nn.Parameter]) -> list[Any]:
        """Return those that an optimizer may take into one operator: on one mesh each, for torch mixes none."""
        groups: dict[Any, list[nn.Parameter]] = {}
        for parameter in parameters:
            groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        return parameters if len(groups) < 2 else [{"params": group} for group in groups.values()]

    @contextlib.contextmanager
    def sharing(self, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Context manager: yield this rank's part of the sequences in `batch`, on the GPU, for a forward
        and backward."""
        plan = self.plan
        length = batch["input_ids"].shape[1]
        if length % (2 * plan.sequence):
            raise UsageError(
                f"{length:,} tokens cannot be divided by {2 * plan.sequence}",
                value=f"--parallel {self._spec.parallel}",
                hint=f"--context-length {length - length % (2 * plan.sequence)}",
            )
        batch = _add_positions(batch)
        if plan.ulysses > 1:
            from memprof.workload.ulysses import exchange_heads

            place = self._get_submesh("sequence").get_local_rank()
            part = slice(place * length // plan.sequence, (place + 1) * length // plan.sequence)
            own = {name: tensor[:, part].contiguous() for name, tensor in batch.items()}
            del batch
            with exchange_heads(self._get_submesh("sequence").get_group()):
                yield own
            return
        from torch.distributed.tensor.experimental import context_parallel

        tensors = list(batch.values())
        options = distributed.cp_options.get()
        balanced = options.enable_load_balance
        # Else positions are out of order, and transformers makes a mask: it takes a sequence for several packed ones.
        options.enable_load_balance = False
        try:
            mesh, dims = self._get_submesh("sequence"), [1] * len(tensors)
            with context_parallel(mesh, buffers=tensors, buffer_seq_dims=dims, no_restore_buffers=set(tensors)):
                yield batch
        finally:
            options.enable_load_balance = balanced

    def called(self, model: nn.Module) -> nn.Module:
        """Return the module to call for `model`: its wrapper, if there is one."""
        return model if self._ddp_wrapper is None else self._ddp_wrapper

    def gradient_sync(self, last: bool) -> contextlib.AbstractContextManager[object]:
        """Have DistributedDataParallel reduce gradients in the last micro-batch of a step alone."""
        return contextlib.nullcontext() if last or self._ddp_wrapper is None else self._ddp_wrapper.no_sync()

    @property
    def autocasts(self) -> bool:
        """Return whether mixed precision uses autocast: fully_shard has its own."""
        return not self.plan.sharded


def _dispatch_layers(model: Any) -> None:
    """Put layers on the GPUs of one process by accelerate, as `device_map="auto"` does; UsageError: no room."""
    quantization.import_required("accelerate")
    import accelerate
    from accelerate.utils import get_balanced_memory

    whole = sorted(getattr(model, "_no_split_modules", None) or [])
    memory = get_balanced_memory(model, no_split_module_classes=whole)
    found = accelerate.infer_auto_device_map(model, max_memory=memory, no_split_module_classes=whole)
    beside = sorted(name for name, device in found.items() if device in ("cpu", "disk"))
    if beside:
        raise UsageError(
            "the GPUs do not hold all layers: the rest would be in host memory",
            value=f"{len(beside)} of {len(found)} parts, {beside[0]} among them",
            hint="more GPUs, or larger ones",
        )
    accelerate.dispatch_model(model, found)


def _add_positions(batch: dict[str, Any]) -> dict[str, Any]:
    """Add each token's position and the label of the token after it: a part of a sequence does not know them."""
    ids = batch["input_ids"]
    made = {"input_ids": ids, "position_ids": torch.arange(ids.shape[1], device=ids.device).expand_as(ids).contiguous()}
    labels = batch.get("labels")
    if labels is not None:
        made["labels"] = labels
        made["shift_labels"] = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    return made
