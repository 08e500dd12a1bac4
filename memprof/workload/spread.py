"""One rank's part of a parallel run, by torch's own functions: DistributedDataParallel, fully_shard, parallelize_module
and context_parallel. Pipelines are in stages.py, Ulysses is in ulysses.py.

Sizes are not computed by formula: this is what a script for torchrun does with a model that it has built.
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

_MESH_DIMS = ("stages", "replicate", "shard", "sequence", "tensor")
_UNSHARDED_STYLES = frozenset({"replicate", "replicated_with_grad_allreduce"})
# Of gradients under FSDP's mixed precision, torchtitan's default (config/job_config.py, mixed_precision_reduce).
_AUTOCAST_REDUCE_DTYPE = torch.float32


class RankPlacement:
    """Rank `rank` (from 0) of a parallel `plan`: its part of the model and of each batch.

    Raises UsageError if this torch has no torch.distributed.
    """

    def __init__(self, plan: ParallelPlan, rank: int, spec: TargetSpec) -> None:
        if not dist.is_available():
            raise UsageError("this torch was built without torch.distributed", hint="install torch from PyPI")
        self.plan, self.rank, self._spec = plan, rank, spec
        self._mesh: Any = None
        self._ddp_wrapper: Any = None

    def join(self) -> None:
        """Join the NCCL process group and create the device mesh; nothing if one process has all GPUs."""
        from torch.distributed.device_mesh import init_device_mesh

        plan = self.plan
        if plan.layers > 1:
            return  # one process
        torch.cuda.set_device(self.rank % torch.cuda.device_count())
        dist.init_process_group("nccl", rank=self.rank, world_size=plan.size)
        shape = (plan.stages, plan.replicate, plan.shard, plan.sequence, plan.tensor)
        self._mesh = init_device_mesh("cuda", shape, mesh_dim_names=_MESH_DIMS)

    def _get_submesh(self, *names: str) -> Any:
        """Return the submesh of the dimensions `names`; several dimensions are flattened to one."""
        return self._mesh[names[0]] if len(names) == 1 else self._mesh[names]._flatten("_".join(names))

    def make_stage(self, model: nn.Module) -> nn.Module:
        """Return this rank's pipeline stage of `model`."""
        return ModelStage(model, self._mesh["stages"].get_local_rank(), self.plan.stages)

    def make_pipeline(self, stage: nn.Module, model: Any, example: tuple[int, int], device: Device) -> Pipeline:
        """Return the pipeline schedule of `stage` of `model`; `example` is a micro-batch's (sequences, tokens)."""
        return Pipeline(stage, model, self.plan, self._mesh["stages"], example, device)

    def place_model(self, model: nn.Module, device: str) -> None:
        """Shard or wrap `model` by the plan and move it from host memory to this rank's GPU, `device`.
        Raises UsageError if a part of the plan does not apply to the model."""
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
        gradient_mesh = self._get_submesh(
            *(name for name in ("replicate", "shard", "sequence") if self._mesh[name].size() > 1)
        )
        self._ddp_wrapper = nn.parallel.DistributedDataParallel(
            model, device_ids=[torch.cuda.current_device()], process_group=gradient_mesh.get_group()
        )

    def _shard(self, model: nn.Module) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        plan = self.plan
        options: dict[str, Any] = {}
        mesh = self._get_submesh("shard", "sequence") if plan.sequence > 1 else self._get_submesh("shard")
        if plan.replicate > 1:
            # Two directions of the mesh: replicas, and shards among them.
            if plan.sequence > 1:
                problem = "replicas of shards beside context parallelism are not here yet"
                raise UsageError(problem, value=f"--parallel {self._spec.parallel}", hint="fsdp in the place of hsdp")
            mesh = self._mesh["replicate", "shard"]
        if self._spec.amp is not None:
            dtype = getattr(torch, self._spec.amp)
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=_AUTOCAST_REDUCE_DTYPE)
        if not plan.reshard:
            options["reshard_after_forward"] = False  # else torch's choice: of layers, and not of the root
        layers = model.layers if isinstance(model, ModelStage) else [layer for _, layer in find_layers(model, "fsdp")]
        for layer in layers:
            fully_shard(layer, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)

    def _shard_tensors(self, model: Any) -> None:
        """Apply tensor parallelism to `model` by transformers' own plan (`tp_plan`) for the architecture."""
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
        unknown = sorted(set(tp_plan.values()) - styles.keys() - _UNSHARDED_STYLES)
        if unknown:
            problem = "a part of this architecture's tensor-parallel plan is not here yet"
            raise UsageError(problem, value=f"{architecture}: {unknown[0]}", hint=hint)
        style_by_module = {}
        for name, _ in model.named_modules():
            style = next((style for pattern, style in tp_plan.items() if fnmatch.fnmatch(name, pattern)), "")
            if style in styles:
                style_by_module[name] = styles[style]()
        parallelize_module(model, self._get_submesh("tensor"), style_by_module)

    def group_parameters(self, parameters: list[nn.Parameter]) -> list[Any]:
        """Return `parameters` as parameter groups for an optimizer, one per device mesh: foreach cannot mix meshes."""
        groups: dict[Any, list[nn.Parameter]] = {}
        for parameter in parameters:
            groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        return parameters if len(groups) < 2 else [{"params": group} for group in groups.values()]

    @contextlib.contextmanager
    def shard_batch(self, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Context manager around a forward and backward: yield this rank's part of the sequences in `batch`.
        Raises UsageError if the length cannot be divided."""
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

            index = self._get_submesh("sequence").get_local_rank()
            token_range = slice(index * length // plan.sequence, (index + 1) * length // plan.sequence)
            shard = {name: tensor[:, token_range].contiguous() for name, tensor in batch.items()}
            del batch
            with exchange_heads(self._get_submesh("sequence").get_group()):
                yield shard
            return
        from torch.distributed.tensor.experimental import context_parallel

        tensors = list(batch.values())
        options = distributed.cp_options.get()
        load_balance = options.enable_load_balance
        # Else positions are out of order, and transformers makes a mask: it takes a sequence for several packed ones.
        options.enable_load_balance = False
        try:
            mesh, dims = self._get_submesh("sequence"), [1] * len(tensors)
            with context_parallel(mesh, buffers=tensors, buffer_seq_dims=dims, no_restore_buffers=set(tensors)):
                yield batch
        finally:
            options.enable_load_balance = load_balance

    def get_wrapper(self, model: nn.Module) -> nn.Module:
        """Return the DistributedDataParallel wrapper of `model`, or `model` if it has none."""
        return model if self._ddp_wrapper is None else self._ddp_wrapper

    def gradient_sync(self, is_last: bool) -> contextlib.AbstractContextManager[object]:
        """Return a context in which DistributedDataParallel reduces gradients only if the micro-batch `is_last`."""
        return contextlib.nullcontext() if is_last or self._ddp_wrapper is None else self._ddp_wrapper.no_sync()

    @property
    def uses_autocast(self) -> bool:
        """Return whether mixed precision uses torch.autocast; fully_shard has its own mixed precision."""
        return not self.plan.sharded


def _dispatch_layers(model: Any) -> None:
    """Place layers on the GPUs of this process by accelerate, as `device_map="auto"`; raise UsageError if too large."""
    quantization.import_required("accelerate")
    import accelerate
    from accelerate.utils import get_balanced_memory

    unsplit_classes = sorted(getattr(model, "_no_split_modules", None) or [])
    max_memory = get_balanced_memory(model, no_split_module_classes=unsplit_classes)
    device_map = accelerate.infer_auto_device_map(model, max_memory=max_memory, no_split_module_classes=unsplit_classes)
    offloaded = sorted(name for name, device in device_map.items() if device in ("cpu", "disk"))
    if offloaded:
        raise UsageError(
            "the GPUs do not hold all layers: the rest would be in host memory",
            value=f"{len(offloaded)} of {len(device_map)} parts, {offloaded[0]} among them",
            hint="more GPUs, or larger ones",
        )
    accelerate.dispatch_model(model, device_map)


def _add_positions(batch: dict[str, Any]) -> dict[str, Any]:
    """Return `batch` with position ids and shifted labels, which a rank cannot compute from its part of a sequence."""
    ids = batch["input_ids"]
    out = {"input_ids": ids, "position_ids": torch.arange(ids.shape[1], device=ids.device).expand_as(ids).contiguous()}
    labels = batch.get("labels")
    if labels is not None:
        out["labels"] = labels
        out["shift_labels"] = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    return out
