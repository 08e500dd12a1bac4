"""Stage of a pipeline: one rank's layers of a causal language model, run by torch's schedule over micro-batches.

The first stage has the embedding, the last one the norm and the head. Layers are divided evenly; if there is a rest,
the first stages have one more. Weights tied across stages are two parameters, as on real GPUs.
"""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any

import torch
from torch import nn

from memprof.errors import UsageError
from memprof.trace.events import PhaseKind
from memprof.workload.device import Device
from memprof.workload.loss import logits_loss_function
from memprof.workload.plan import ParallelPlan


class ModelStage(nn.Module):
    """Stage `index` (from 0) of `count` of `model`; UsageError if transformers does not say how that is cut."""

    def __init__(self, model: Any, index: int, count: int) -> None:
        super().__init__()
        core: Any = getattr(model, model.base_model_prefix, None)
        if not isinstance(getattr(core, "layers", None), nn.ModuleList) or not hasattr(core, "embed_tokens"):
            problem = "transformers does not say how this architecture is cut into stages"
            raise UsageError(problem, value=type(model).__name__, hint="--parallel fsdp")
        each, more = divmod(len(core.layers), count)
        first = index * each + min(index, more)
        last = first + each + (index < more)
        self.is_first, self.is_last = index == 0, index == count - 1
        config = core.config = copy.copy(core.config)
        config.num_hidden_layers = last - first
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[first:last]
        core.layers = core.layers[first:last]
        if not self.is_first:
            core.embed_tokens = None
        names = {id(module): name for name, module in model.named_children()}
        self._core, self._head = model.base_model_prefix, ""
        self.tp_plan = getattr(model, "tp_plan", None)  # transformers' own, by these names
        self.architecture = type(model).__name__
        self.add_module(self._core, core)  # under the names that the model has for them
        if self.is_last:
            head = model.get_output_embeddings()
            self._head = names[id(head)]
            self.add_module(self._head, head)
        else:
            core.norm = nn.Identity()

    @property
    def layers(self) -> list[nn.Module]:
        """Return the layers of this stage."""
        core: Any = self.get_submodule(self._core)
        return list(core.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return hidden states, or logits, of token ids (batch, length) or hidden states (batch, length, width)."""
        given = {"input_ids": x} if self.is_first else {"inputs_embeds": x}
        hidden = self.get_submodule(self._core)(**given, use_cache=False).last_hidden_state
        return self.get_submodule(self._head)(hidden) if self.is_last else hidden


class Pipeline:
    """Torch's schedule over `stage` of `model`, which is on this rank's GPU; `ranks` is the mesh of all stages.

    `example` are sequences and tokens of a micro-batch.
    """

    def __init__(
        self, stage: nn.Module, model: Any, plan: ParallelPlan, ranks: Any, example: tuple[int, int], device: Device
    ) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        index, config, loss = ranks.get_local_rank(), model.config, logits_loss_function(model)
        dtype = next(stage.parameters()).dtype
        states = torch.empty(*example, config.hidden_size, dtype=dtype, device="meta", requires_grad=True)
        given = torch.empty(example, dtype=torch.int64, device="meta") if index == 0 else states
        is_last = index == plan.stages - 1
        output_example = (
            torch.empty(*example, config.vocab_size, dtype=dtype, device="meta", requires_grad=True)
            if is_last
            else states
        )
        gpu = torch.device("cuda", torch.cuda.current_device())
        stage_of_torch = PipelineStage(
            stage, index, plan.stages, gpu, input_args=(given,), output_args=(output_example,), group=ranks.get_group()
        )
        self._first, self._last = index == 0, is_last
        self._device, self._step = device, 0
        self._wrap_in_phase(stage_of_torch, "forward_one_chunk", PhaseKind.FORWARD)
        self._wrap_in_phase(stage_of_torch, "backward_one_chunk", PhaseKind.BACKWARD)

        def named_loss(output: Any, target: Any) -> torch.Tensor:
            with device.phase(PhaseKind.FORWARD, self._step, self._micro_batch):
                return loss(output, target)

        kind = Schedule1F1B if plan.schedule == "1f1b" else ScheduleGPipe
        self._micro_batch = 1
        schedule: Any = kind(stage_of_torch, plan.microbatches, loss_fn=named_loss)
        # Else the last stage puts all logits of a step together, for nobody.
        no_outputs = (
            {"return_outputs": False} if "return_outputs" in inspect.signature(schedule.step).parameters else {}
        )
        self._schedule_step = functools.partial(schedule.step, **no_outputs)

    def _wrap_in_phase(self, stage: Any, name: str, kind: PhaseKind) -> None:
        original = getattr(stage, name)

        def run(chunk: int, *args: Any, **options: Any) -> Any:
            self._micro_batch = chunk + 1
            with self._device.phase(kind, self._step, chunk + 1):
                return original(chunk, *args, **options)

        setattr(stage, name, run)

    def step(self, step: int, ids: torch.Tensor, labels: torch.Tensor) -> None:
        """Run all micro-batches forward and backward; `ids` and `labels` (micro-batches x sequences, tokens)."""
        self._step = step
        given = (ids,) if self._first else ()
        self._schedule_step(*given, **({"target": labels, "losses": []} if self._last else {}))
