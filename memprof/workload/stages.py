"""Pipeline parallelism: one rank's stage of a causal language model, and torch's schedule over micro-batches.

The first stage has the embedding, the last one the norm and the head. Layers are divided evenly; where they do not
divide, the first stages have one more. A weight that is tied across stages is two parameters, as on real GPUs.
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
from memprof.workload.loss import make_logits_loss
from memprof.workload.plan import ParallelPlan


class ModelStage(nn.Module):
    """Pipeline stage `index` (from 0) of `count` stages of a transformers model.

    Raises UsageError if the model does not have its embedding and layers where Llama has them.
    """

    def __init__(self, model: Any, index: int, count: int) -> None:
        super().__init__()
        base: Any = getattr(model, model.base_model_prefix, None)
        if not isinstance(getattr(base, "layers", None), nn.ModuleList) or not hasattr(base, "embed_tokens"):
            problem = "transformers does not say how this architecture is cut into stages"
            raise UsageError(problem, value=type(model).__name__, hint="--parallel fsdp")
        layers_per_stage, num_longer_stages = divmod(len(base.layers), count)
        first_layer = index * layers_per_stage + min(index, num_longer_stages)
        last_layer = first_layer + layers_per_stage + (index < num_longer_stages)
        self.is_first, self.is_last = index == 0, index == count - 1
        config = base.config = copy.copy(base.config)
        config.num_hidden_layers = last_layer - first_layer
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[first_layer:last_layer]
        base.layers = base.layers[first_layer:last_layer]
        if not self.is_first:
            base.embed_tokens = None
        names = {id(module): name for name, module in model.named_children()}
        self._core, self._head = model.base_model_prefix, ""
        self.tp_plan = getattr(model, "tp_plan", None)  # transformers' own, by these names
        self.architecture = type(model).__name__
        self.add_module(self._core, base)  # under the names that the model has for them
        if self.is_last:
            output_head = model.get_output_embeddings()
            self._head = names[id(output_head)]
            self.add_module(self._head, output_head)
        else:
            base.norm = nn.Identity()

    @property
    def layers(self) -> list[nn.Module]:
        """Return the transformer layers of this stage."""
        base: Any = self.get_submodule(self._core)
        return list(base.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the stage's output: hidden states (batch, length, width), or the last stage's logits.
        `x` has token ids (batch, length) in the first stage, and hidden states (batch, length, width) in later ones."""
        inputs = {"input_ids": x} if self.is_first else {"inputs_embeds": x}
        hidden = self.get_submodule(self._core)(**inputs, use_cache=False).last_hidden_state
        return self.get_submodule(self._head)(hidden) if self.is_last else hidden


class Pipeline:
    """Torch's pipeline schedule for `stage` of `model`, which is on this rank's GPU.
    `ranks` is the device mesh of all stages; `example` is the shape (sequences, tokens) of a micro-batch."""

    def __init__(
        self, stage: nn.Module, model: Any, plan: ParallelPlan, ranks: Any, example: tuple[int, int], device: Device
    ) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        index, config, loss = ranks.get_local_rank(), model.config, make_logits_loss(model)
        dtype = next(stage.parameters()).dtype
        hidden_example = torch.empty(*example, config.hidden_size, dtype=dtype, device="meta", requires_grad=True)
        inputs = torch.empty(example, dtype=torch.int64, device="meta") if index == 0 else hidden_example
        is_last = index == plan.stages - 1
        outputs = (
            torch.empty(*example, config.vocab_size, dtype=dtype, device="meta", requires_grad=True)
            if is_last
            else hidden_example
        )
        gpu = torch.device("cuda", torch.cuda.current_device())
        pipeline_stage = PipelineStage(
            stage, index, plan.stages, gpu, input_args=(inputs,), output_args=(outputs,), group=ranks.get_group()
        )
        self._is_first, self._is_last = index == 0, is_last
        self._device, self._step = device, 0
        self._wrap_in_phase(pipeline_stage, "forward_one_chunk", PhaseKind.FORWARD)
        self._wrap_in_phase(pipeline_stage, "backward_one_chunk", PhaseKind.BACKWARD)

        def compute_recorded_loss(output: Any, target: Any) -> torch.Tensor:
            with device.phase(PhaseKind.FORWARD, self._step, self._micro_batch):
                return loss(output, target)

        schedule_class = Schedule1F1B if plan.schedule == "1f1b" else ScheduleGPipe
        self._micro_batch = 1
        schedule: Any = schedule_class(pipeline_stage, plan.microbatches, loss_fn=compute_recorded_loss)
        # Else the last stage concatenates all logits of a step, which nothing uses.
        output_options = (
            {"return_outputs": False} if "return_outputs" in inspect.signature(schedule.step).parameters else {}
        )
        self._schedule_step = functools.partial(schedule.step, **output_options)

    def _wrap_in_phase(self, stage: Any, name: str, kind: PhaseKind) -> None:
        original = getattr(stage, name)

        def run_in_phase(chunk: int, *args: Any, **options: Any) -> Any:
            self._micro_batch = chunk + 1
            with self._device.phase(kind, self._step, chunk + 1):
                return original(chunk, *args, **options)

        setattr(stage, name, run_in_phase)

    def step(self, step: int, ids: torch.Tensor, labels: torch.Tensor) -> None:
        """Run forward and backward of all micro-batches; `ids` and `labels` are (micro-batches x sequences, tokens)."""
        self._step = step
        inputs = (ids,) if self._is_first else ()
        self._schedule_step(*inputs, **({"target": labels, "losses": []} if self._is_last else {}))
