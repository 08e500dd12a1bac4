"""The moments of a training step that may be its peak, on a single GPU or on one rank of several."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from memprof.estimate.layers import DecoderLayer, record_layer
from memprof.estimate.methods import MethodPlan
from memprof.estimate.projections import LayerSettings
from memprof.estimate.ranks import Elements, Rank
from memprof.estimate.state import CUBLAS_WORKSPACE, PeakMoment, StaticMemory, TermBytes, sum_position_bytes
from memprof.estimate.tape import FLOAT32, Tape
from memprof.units import GIB

CHUNK_BYTES = GIB  # The logits that a chunked loss has at a time (fixes/chunked_loss.py, CHUNK_BYTES).


class TrainingMoments:
    """The moments of a later training step, which begins with optimizer state and without gradients."""

    def __init__(self, setting: LayerSettings, plan: MethodPlan, memory: StaticMemory, rank: Rank) -> None:
        full_geometry = setting.geometry
        if rank.gathers and setting.amp:
            # fully_shard's mixed precision gathers half-precision parameters, so that autocast casts nothing.
            setting = dataclasses.replace(setting, amp=False, itemsize=2)
        setting = dataclasses.replace(
            setting,
            geometry=rank.shard_geometry(full_geometry),
            context_length=-(-setting.context_length // rank.sequence),
            ulysses_ranks=rank.ulysses,
        )
        self.setting, self.plan, self.rank = setting, plan, rank
        self.g = g = setting.geometry
        self.tokens = setting.tokens
        self.trains_weights = setting.trains_weights
        self.elements = elements = rank.count_elements(full_geometry)
        self.memory = memory = self._compute_rank_memory(memory, elements, full_geometry.num_parameters)
        self.full_itemsize = setting.itemsize
        self.reduced_itemsize = plan.itemsize
        self.static_terms: TermBytes = {
            "parameters": memory.parameters // rank.param_shards,
            "optimizer state": memory.optimizer // rank.state_shards,
            "library workspace": 2 * CUBLAS_WORKSPACE,
        }
        self.logits_itemsize = setting.compute_itemsize
        self.vocab_tokens = g.vocab * self.tokens
        self.logits_bytes = self.logits_itemsize * self.vocab_tokens
        self.hidden_bytes = g.hidden * setting.stream_itemsize * self.tokens
        self.final_norm_bytes = self._measure_final_norm()
        self.saved_bytes = self._list_saved_bytes()

    def _compute_rank_memory(self, memory: StaticMemory, elements: Elements, num_parameters: int) -> StaticMemory:
        """Return this rank's part of `memory`, for the parameters that it computes with, before sharding."""
        if self.rank.tensor == self.rank.stages == 1:
            return memory
        share = elements.total / num_parameters
        undivided = elements.undivided * self.plan.itemsize  # Adapters are not divided (workload/plan.py, check_plan).
        rank_memory = StaticMemory(*(round(num_bytes * share) for num_bytes in dataclasses.astuple(memory)))
        return dataclasses.replace(rank_memory, gradients=rank_memory.gradients + undivided)

    def _get_comm_terms(
        self, num_left: int = 0, *, num_gathered: int = 0, num_fetched: int = 0, num_reduced: int = 0, root: int = 1
    ) -> TermBytes:
        """Return the bytes of gathered parameters and of communication buffers at a moment, by term.

        For torch's fully_shard (_fsdp_param_group.py): `num_gathered` layers are unsharded (without resharding the
        `num_left` layers before the backward), `num_fetched` prefetched, `num_reduced` in reduction. The root group
        (embedding and head) is unsharded if `root` is 1.
        """
        rank, elements = self.rank, self.elements
        if rank.stages > 1:
            hidden_bytes = self.hidden_bytes * rank.microbatches
            return {"communication": hidden_bytes * (2 - rank.is_first - rank.is_last)}
        if rank.gathers:
            if not rank.reshard:
                num_gathered, num_fetched = num_left, 0
            unsharded = num_gathered * elements.layer + elements.root * root
            buffers = num_fetched * elements.layer * self.full_itemsize
            if self.trains_weights:
                buffers += num_reduced * elements.layer * self.reduced_itemsize
            return {"unsharded parameters": unsharded * self.full_itemsize, "communication": buffers}
        if rank.replicas == 1:
            return {}
        if rank.grad_shards == 1:
            return {"communication": self.memory.gradients}  # DistributedDataParallel's buckets copy all gradients
        return {"communication": 2 * elements.layer * self.plan.itemsize if self.trains_weights else 0}

    def _build_moment(
        self, name: str, comm: TermBytes, *, activations: int = 0, gradients: int = 0, unreduced: int = 0,
        logits: int = 0, temporaries: int = 0,
    ) -> PeakMoment:  # fmt: skip
        """Return a moment with these bytes beside the static ones; `unreduced` gradients are not sharded yet."""
        terms = {
            **self.static_terms,
            "gradients": gradients // self.rank.grad_shards + unreduced,
            "activations": activations,
            "logits and loss": logits,
            "temporaries": temporaries,
        }
        return PeakMoment(name, terms | {term: size for term, size in comm.items() if size})

    def _measure_final_norm(self) -> int:
        tape = Tape(self.tokens, training=True)
        layer = DecoderLayer(tape, self.setting)
        hidden = tape.add_input(self.g.hidden, self.setting.stream_itemsize, needs_grad=True, name="hidden states")
        layer.record_norm(hidden, "input of the head")
        saved_bytes = tape.saved_bytes + (hidden.num_bytes if hidden.num_references > 1 else 0)
        if self.trains_weights:
            saved_bytes += self.g.hidden * self.tokens * self.setting.compute_itemsize
        return saved_bytes

    def _sum_cast_weights(self) -> int:
        """Return the bytes of the half-precision copies of a layer's weights under autocast."""
        if not self.setting.amp or self.plan.quantized:
            return 0
        return 2 * self.g.linear_parameters // self.g.layers

    def _list_saved_bytes(self) -> list[int]:
        """Return the bytes that each layer saves for the backward."""
        g, layers = self.g, self.elements.num_layers
        if self.plan.method.checkpointing:
            return [self.hidden_bytes + record_layer(self.setting)[0].kept_bytes] * layers
        layer_bytes = record_layer(self.setting)[1] + self._sum_cast_weights()
        needs_grad = self.trains_weights or not self.rank.is_first
        first_bytes = record_layer(self.setting, hidden_needs_grad=needs_grad)[1] + self._sum_cast_weights()
        saved_bytes = [first_bytes] + [layer_bytes] * (layers - 1)
        if g.global_interval:
            no_window = dataclasses.replace(self.setting, geometry=dataclasses.replace(g, window=0))
            layer_bytes = record_layer(no_window)[1] + self._sum_cast_weights()
            saved_bytes[g.global_interval - 1 :: g.global_interval] = [layer_bytes] * (layers // g.global_interval)
        return saved_bytes

    def _sum_head_copy(self) -> int:
        return 2 * self.g.vocab * self.g.hidden if self.setting.amp else 0

    def _sum_logits(self) -> int:
        """Return the bytes of the logits, of their copy for a soft cap, and of autocast's copy of the head's weight."""
        return self.logits_bytes * (2 if self.g.has_softcap else 1) + self._sum_head_copy()

    def list_moments(self) -> Iterator[PeakMoment]:
        """Yield the moments of the step that may be its peak, in order."""
        rank = self.rank
        other_bytes = sum_position_bytes(self.setting) + 16 * self.tokens  # token ids and labels, int64
        if rank.stages == 1:
            yield from self._iter_backward_moments(other_bytes, 0)
        else:
            # The backward of the first micro-batch begins without gradients, later ones with gradients; by then one
            # micro-batch fewer waits, unless another forward has run in between.
            batch_bytes = self._sum_micro_batch_bytes()
            num_others = rank.in_flight - (rank.in_flight == rank.microbatches)
            yield from self._iter_backward_moments(other_bytes + (rank.in_flight - 1) * batch_bytes, 0)
            other_bytes += max(num_others - 1, 0) * batch_bytes
            yield from self._iter_backward_moments(other_bytes, self.memory.gradients)
        temporaries = self.memory.temporaries // rank.state_shards
        comm = {} if rank.gathers else self._get_comm_terms()
        yield self._build_moment("optimizer step", comm, gradients=self.memory.gradients, temporaries=temporaries)

    def _iter_backward_moments(self, other_bytes: int, prior_grads: int) -> Iterator[PeakMoment]:
        """Yield the moments of a backward; `other_bytes` and gradients of `prior_grads` bytes are live beside it."""
        rank = self.rank
        head = self.g.vocab * self.g.hidden // rank.tensor
        head_grad = head * self.full_itemsize if self.trains_weights and rank.is_last else 0
        if rank.is_last:
            yield from self._iter_loss_moments(other_bytes, prior_grads, head_grad)
        yield from self._iter_layer_moments(other_bytes, prior_grads, head_grad)
        if self.trains_weights and rank.is_first:
            yield from self._iter_embedding_moments(other_bytes, head_grad)

    def _sum_micro_batch_bytes(self) -> int:
        """Return the bytes that a micro-batch saves in this pipeline stage, without autocast's casts of weights."""
        num_bytes = sum(self.saved_bytes) + 16 * self.tokens
        if not self.plan.method.checkpointing:
            num_bytes -= self._sum_cast_weights() * self.elements.num_layers
        if self.rank.is_last:
            # The logits, and their log-softmax, which the loss keeps.
            return num_bytes + self.final_norm_bytes + self.logits_bytes + FLOAT32 * self.vocab_tokens
        return num_bytes + self.hidden_bytes

    def _iter_loss_moments(self, other_bytes: int, prior_grads: int, head_grad: int) -> Iterator[PeakMoment]:
        activations = sum(self.saved_bytes) + self.final_norm_bytes + other_bytes
        all_layers = self.elements.num_layers
        comm_fetch = self._get_comm_terms(all_layers, num_fetched=1)
        if self.plan.chunked_loss:
            yield from self._iter_chunked_loss_moments(activations, prior_grads, head_grad, comm_fetch)
            return
        # transformers' loss works in float32 (loss/loss_utils.py): a copy of the logits, its log-softmax, and in the
        # backward the gradients of both.
        loss = FLOAT32 * self.vocab_tokens
        copy = loss if self.logits_itemsize < FLOAT32 else 0
        cast_bytes = self._sum_cast_weights() * self.g.layers if self.plan.method.checkpointing else 0
        head_logits = self.logits_bytes + self._sum_head_copy() * self.trains_weights
        for name, comm, extra_bytes, unreduced, logits in (
            ("loss, forward", self._get_comm_terms(all_layers), cast_bytes + 2 * self.hidden_bytes, 0, copy + loss),
            ("loss, backward", comm_fetch, 0, 0, 3 * loss),
            ("head, backward", comm_fetch, self.hidden_bytes, head_grad, head_logits),
        ):
            live_bytes, logits = activations + extra_bytes, self._sum_logits() + logits
            yield self._build_moment(
                name, comm, activations=live_bytes, gradients=prior_grads, unreduced=unreduced, logits=logits
            )

    def _iter_chunked_loss_moments(
        self, activations: int, prior_grads: int, head_grad: int, comm: TermBytes
    ) -> Iterator[PeakMoment]:
        """Yield the moments at which a chunk's logits are replaced by their gradient, and the head's gradient is cast.

        A chunk is sized for its logits, their float32 copy and a float32 temporary, of which at most two exist at once
        (fixes/head_loss.py). With several chunks, the head's gradients are summed in float32.
        """
        num_weights = self.g.vocab * self.g.hidden // self.rank.tensor
        upcast = FLOAT32 * (self.logits_itemsize < FLOAT32)
        rows = min(CHUNK_BYTES // (self.g.vocab * (self.logits_itemsize + upcast + FLOAT32)), self.tokens)
        is_summed = rows < self.tokens and self.trains_weights
        sum_bytes = FLOAT32 * num_weights if is_summed else 0
        for logits, unreduced in (
            ((self.logits_itemsize + FLOAT32) * rows, sum_bytes),
            (0 if is_summed else self.logits_itemsize * rows, sum_bytes + head_grad),
        ):
            live_bytes, logits = activations + self.hidden_bytes, self.g.vocab * logits + self._sum_head_copy()
            name = "loss, backward, in chunks"
            yield self._build_moment(
                name, comm, activations=live_bytes, gradients=prior_grads, unreduced=unreduced, logits=logits
            )

    @property
    def _held_logits(self) -> int:
        """Return the bytes that the model's output holds through the backward: the logits, or with a chunked loss
        autocast's copy of the head's weight."""
        if not self.rank.is_last:
            return 0
        return self._sum_head_copy() if self.plan.chunked_loss else self.logits_bytes

    def _iter_layer_moments(self, other_bytes: int, prior_grads: int, head_grad: int) -> Iterator[PeakMoment]:
        """Yield the moments in the backward of the last layer (most activations) and of the first (most gradients)."""
        tape = Tape(self.tokens, training=True)
        hidden = tape.add_input(self.g.hidden, self.setting.stream_itemsize, needs_grad=True, name="hidden states")
        output = DecoderLayer(tape, self.setting).record(hidden)
        tape.drop(output)
        saved_bytes = tape.live
        recomputed = saved_bytes + self._sum_cast_weights() if self.plan.method.checkpointing else 0
        forward_peak = tape.peak
        tape.peak = tape.live
        grads = tape.run_backward(output)
        temp_bytes = max(tape.peak, forward_peak if recomputed else 0) - saved_bytes
        # A reduction may make the gradients float32.
        layer_grads = grads * self.reduced_itemsize // self.full_itemsize if self.trains_weights else 0
        layers = self.elements.num_layers
        num_done_by_name = {"last layer, backward": 0, "first layer, backward": layers - 1}
        if self.rank.gathers:
            # Moments at which the next layer's gradients are reduced and the previous layer is prefetched.
            num_done_by_name |= {"last layer but one, backward": 1, "second layer, backward": layers - 2}
        for name, done in num_done_by_name.items():
            if not 0 <= done < layers:
                continue
            comm = self._get_comm_terms(
                layers - done, num_gathered=1, num_fetched=done < layers - 1, num_reduced=done > 0
            )
            yield self._build_moment(
                name, comm, activations=sum(self.saved_bytes[: layers - done]) + other_bytes + recomputed + temp_bytes,
                gradients=prior_grads or done * layer_grads, unreduced=0 if prior_grads else head_grad,
                logits=self._held_logits,
            )  # fmt: skip

    def _iter_embedding_moments(self, other_bytes: int, head_grad: int) -> Iterator[PeakMoment]:
        rank, elements = self.rank, self.elements
        # The gradient of a tied embedding is added to the head's out of place.
        is_tied = self.g.tied and rank.tensor == rank.stages == 1
        tied_grads = (1 if self.plan.chunked_loss else 2) * head_grad if is_tied else 0
        root_grads, own_grads = (
            elements.root * itemsize * rank.gathers for itemsize in (self.reduced_itemsize, self.full_itemsize)
        )
        yield self._build_moment(
            "embedding, backward",
            self._get_comm_terms(num_reduced=int(rank.gathers)),
            activations=other_bytes + self.hidden_bytes, gradients=max(self.memory.gradients - root_grads, 0),
            unreduced=own_grads + tied_grads, logits=self._held_logits,
        )  # fmt: skip
        if not rank.gathers:
            return
        comm = self._get_comm_terms(root=0)
        comm["communication"] = comm.get("communication", 0) + root_grads
        yield self._build_moment(
            "reduction of the root", comm,
            activations=other_bytes, gradients=self.memory.gradients, unreduced=own_grads, logits=self._held_logits,
        )  # fmt: skip
