"""The moments of a training step that may be its peak, on a single GPU or on one rank of several."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from memprof.estimate.layers import DecoderLayer, record_layer
from memprof.estimate.methods import MethodPlan
from memprof.estimate.projections import LayerSettings
from memprof.estimate.ranks import Elements, Rank
from memprof.estimate.state import CUBLAS_WORKSPACE, PeakMoment, StaticMemory, Terms, sum_position_bytes
from memprof.estimate.tape import FLOAT32, Tape
from memprof.units import GIB

CHUNK_BYTES = GIB  # The logits that a chunked loss has at a time (fixes/chunked_loss.py, CHUNK_BYTES).


class TrainingMoments:
    """The moments of a training step in the steady state: with optimizer state, and without gradients at the start."""

    def __init__(self, setting: LayerSettings, plan: MethodPlan, memory: StaticMemory, rank: Rank) -> None:
        whole = setting.geometry
        if rank.gathers and setting.amp:
            # fully_shard's mixed precision gathers half-precision parameters, so that autocast casts nothing.
            setting = dataclasses.replace(setting, amp=False, itemsize=2)
        setting = dataclasses.replace(
            setting,
            geometry=rank.geometry(whole),
            context_length=-(-setting.context_length // rank.sequence),
            ulysses_ranks=rank.ulysses,
        )
        self.setting, self.plan, self.rank = setting, plan, rank
        self.g = g = setting.geometry
        self.tokens = setting.tokens
        self.trains_weights = setting.trains_weights
        self.elements = elements = rank.elements(whole)
        self.memory = memory = self._rank_memory(memory, elements, whole.num_parameters)
        self.full_itemsize = setting.itemsize
        self.reduced_itemsize = plan.itemsize
        self.static: Terms = {
            "parameters": memory.parameters // rank.parameters,
            "optimizer state": memory.optimizer // rank.optimizer,
            "library workspace": 2 * CUBLAS_WORKSPACE,
        }
        self.logits_itemsize = setting.compute_itemsize
        self.vocab_tokens = g.vocab * self.tokens
        self.logits_bytes = self.logits_itemsize * self.vocab_tokens
        self.hidden_bytes = g.hidden * setting.stream_itemsize * self.tokens
        self.final = self._final_norm_bytes()
        self.kept = self._kept_per_layer()

    def _rank_memory(self, memory: StaticMemory, elements: Elements, num_parameters: int) -> StaticMemory:
        """Return the static memory of the parameters that this rank computes with, before sharding."""
        if self.rank.tensor == self.rank.stages == 1:
            return memory
        share = elements.all / num_parameters
        undivided = elements.undivided * self.plan.itemsize if self.trains_weights else 0
        own = StaticMemory(*(round(part * share) for part in dataclasses.astuple(memory)))
        return dataclasses.replace(own, gradients=own.gradients + undivided)

    def _comm_terms(
        self, left: int = 0, *, layers: int = 0, fetched: int = 0, reduced: int = 0, root: int = 1
    ) -> Terms:
        """Return the terms of gathered parameters and of communication buffers at a moment.

        For fully_shard: `layers` layers are gathered, `fetched` prefetched, `reduced` in reduction, and the root group
        (embedding and head) if `root`; without resharding, `left` layers are gathered. Source:
        torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py: the root group stays gathered until the end of the
        backward, and the buffer of a layer's reduction until the next layer's gradients exist.
        """
        rank, elements = self.rank, self.elements
        if rank.stages > 1:
            states = self.hidden_bytes * rank.microbatches
            return {"communication": states * (2 - rank.is_first - rank.is_last)}
        if rank.gathers:
            if not rank.reshard:
                layers, fetched = left, 0
            whole = layers * elements.layer + elements.root * root
            buffers = fetched * elements.layer * self.full_itemsize
            if self.trains_weights:
                buffers += reduced * elements.layer * self.reduced_itemsize
            return {"unsharded parameters": whole * self.full_itemsize, "communication": buffers}
        if rank.replicas == 1:
            return {}
        if rank.gradients == 1:
            return {"communication": self.memory.gradients}  # DistributedDataParallel's buckets copy all gradients
        return {"communication": 2 * elements.layer * self.plan.itemsize if self.trains_weights else 0}

    def _moment(
        self, name: str, comm: Terms, *, activations: int = 0, gradients: int = 0, waiting: int = 0, logits: int = 0,
        temporaries: int = 0,
    ) -> PeakMoment:  # fmt: skip
        """Return a moment with reduced `gradients`, and with `waiting` bytes of gradients not reduced yet."""
        terms = {
            **self.static,
            "gradients": gradients // self.rank.gradients + waiting,
            "activations": activations,
            "logits and loss": logits,
            "temporaries": temporaries,
        }
        return PeakMoment(name, terms | {term: size for term, size in comm.items() if size})

    def _final_norm_bytes(self) -> int:
        tape = Tape(self.tokens, training=True)
        layer = DecoderLayer(tape, self.setting)
        hidden = tape.add_input(self.g.hidden, self.setting.stream_itemsize, needs_grad=True, name="hidden states")
        out = layer.record_norm(hidden, "input of the head")
        tape.drop(out)
        kept = tape.saved_bytes + (hidden.num_bytes if hidden.num_references > 1 else 0)
        if self.trains_weights:
            kept += self.g.hidden * self.tokens * self.setting.compute_itemsize
        return kept

    def _cast_weight_bytes(self) -> int:
        """Return the bytes of the half-precision copies of a layer's weights under autocast."""
        if not self.setting.amp or self.plan.quantized:
            return 0
        return 2 * self.g.linear_parameters // self.g.layers

    def _kept_per_layer(self) -> list[int]:
        """Return the bytes that each layer saves for the backward."""
        g, layers = self.g, self.elements.layers
        if self.plan.method.checkpointing:
            return [self.hidden_bytes] * layers
        each = record_layer(self.setting)[1] + self._cast_weight_bytes()
        needs_grad = self.trains_weights or not self.rank.is_first
        first = record_layer(self.setting, hidden_needs_grad=needs_grad)[1] + self._cast_weight_bytes()
        kept = [first] + [each] * (layers - 1)
        if g.global_interval and self.setting.has_mask:
            without = dataclasses.replace(self.setting, geometry=dataclasses.replace(g, window=0))
            each = record_layer(without)[1] + self._cast_weight_bytes()
            kept[g.global_interval - 1 :: g.global_interval] = [each] * (layers // g.global_interval)
        return kept

    def _head_copy_bytes(self) -> int:
        return 2 * self.g.vocab * self.g.hidden if self.setting.amp else 0

    def _logits_bytes(self) -> int:
        """Return the bytes of the logits, which the caller holds, a soft cap's copy, and the head's cast weight."""
        return self.logits_bytes * (2 if self.g.has_softcap else 1) + self._head_copy_bytes()

    def list_moments(self) -> Iterator[PeakMoment]:
        """Yield the moments in the order of a step."""
        rank = self.rank
        other_bytes = sum_position_bytes(self.setting) + 16 * self.tokens  # token ids and labels, int64
        if rank.stages == 1:
            yield from self._backward_moments(other_bytes, 0)
        else:
            # The backward of the first micro-batch begins without gradients, later ones with gradients; by then one
            # micro-batch fewer waits, unless another forward has run in between.
            waiting = self._kept_per_micro_batch()
            later = rank.in_flight - (rank.in_flight == rank.microbatches)
            yield from self._backward_moments(other_bytes + (rank.in_flight - 1) * waiting, 0)
            yield from self._backward_moments(other_bytes + max(later - 1, 0) * waiting, self.memory.gradients)
        temporaries = self.memory.temporaries // rank.optimizer
        comm = {} if rank.gathers else self._comm_terms()
        yield self._moment("optimizer step", comm, gradients=self.memory.gradients, temporaries=temporaries)

    def _backward_moments(self, other_bytes: int, accumulated: int) -> Iterator[PeakMoment]:
        """Yield the moments of a backward; other micro-batches hold `other_bytes`, and `accumulated` in gradients."""
        rank = self.rank
        head = self.g.vocab * self.g.hidden // rank.tensor
        head_grad = head * self.full_itemsize if self.trains_weights and rank.is_last else 0
        if rank.is_last:
            yield from self._loss_moments(other_bytes, accumulated, head_grad)
        yield from self._layer_moments(other_bytes, accumulated, head_grad)
        if self.trains_weights and rank.is_first:
            yield from self._embedding_moments(other_bytes, head_grad)

    def _kept_per_micro_batch(self) -> int:
        """Return the bytes that a micro-batch of a pipeline stage saves, without autocast's shared weight copies."""
        kept = sum(self.kept) + 16 * self.tokens
        if not self.plan.method.checkpointing:
            kept -= self._cast_weight_bytes() * self.elements.layers
        if self.rank.is_last:
            # The logits, and their log-softmax, which the loss keeps.
            return kept + self.final + self.logits_bytes + FLOAT32 * self.vocab_tokens
        return kept + self.hidden_bytes

    def _loss_moments(self, other_bytes: int, accumulated: int, head_grad: int) -> Iterator[PeakMoment]:
        activations = sum(self.kept) + self.final + other_bytes
        all_layers = self.elements.layers
        fetched = self._comm_terms(all_layers, fetched=1)
        if self.plan.chunked_loss:
            yield from self._chunked_loss_moments(activations, accumulated, head_grad, fetched)
            return
        # transformers' loss works in float32 (loss/loss_utils.py): a copy of the logits, its log-softmax, and in the
        # backward the gradients of both.
        loss = FLOAT32 * self.vocab_tokens
        upcast = loss if self.logits_itemsize < FLOAT32 else 0
        cached = self._cast_weight_bytes() * self.g.layers if self.plan.method.checkpointing else 0
        of_head = self.logits_bytes + self._head_copy_bytes() * self.trains_weights
        for name, comm, more, waiting, logits in (
            ("loss, forward", self._comm_terms(all_layers), cached + 2 * self.hidden_bytes, 0, upcast + loss),
            ("loss, backward", fetched, 0, 0, 3 * loss),
            ("head, backward", fetched, self.hidden_bytes, head_grad, of_head),
        ):
            live_bytes, logits = activations + more, self._logits_bytes() + logits
            yield self._moment(
                name, comm, activations=live_bytes, gradients=accumulated, waiting=waiting, logits=logits
            )

    def _chunked_loss_moments(
        self, activations: int, accumulated: int, head_grad: int, comm: Terms
    ) -> Iterator[PeakMoment]:
        """Yield the moments at which a chunk of logits becomes a gradient, and at which the head's gradients are cast.

        fixes/head_loss.py: a chunk's size allows for the logits, their float32 copy and a float32 temporary,
        at most two of which exist at once. With several chunks, the head's gradients are summed in float32.
        """
        head = self.g.vocab * self.g.hidden // self.rank.tensor
        upcast = FLOAT32 * (self.logits_itemsize < FLOAT32)
        rows = min(CHUNK_BYTES // (self.g.vocab * (self.logits_itemsize + upcast + FLOAT32)), self.tokens)
        is_summed = rows < self.tokens and self.trains_weights
        summed = FLOAT32 * head if is_summed else 0
        for logits, waiting in (
            ((self.logits_itemsize + FLOAT32) * rows, summed),
            (0 if is_summed else self.logits_itemsize * rows, summed + head_grad),
        ):
            live_bytes, logits = activations + self.hidden_bytes, self.g.vocab * logits + self._head_copy_bytes()
            name = "loss, backward, in chunks"
            yield self._moment(
                name, comm, activations=live_bytes, gradients=accumulated, waiting=waiting, logits=logits
            )

    @property
    def _kept_logits(self) -> int:
        """Return the bytes of the logits, which the caller holds through the backward; lazy logits have none."""
        return 0 if self.plan.chunked_loss or not self.rank.is_last else self.logits_bytes

    def _layer_moments(self, other_bytes: int, accumulated: int, head_grad: int) -> Iterator[PeakMoment]:
        """Yield the moments in the backward of the last layer (all activations) and of the first (all gradients)."""
        tape = Tape(self.tokens, training=True)
        hidden = tape.add_input(self.g.hidden, self.setting.stream_itemsize, needs_grad=True, name="hidden states")
        output = DecoderLayer(tape, self.setting).record(hidden)
        tape.drop(output)
        kept = tape.live
        recomputed = kept + self._cast_weight_bytes() if self.plan.method.checkpointing else 0
        forward_peak = tape.peak
        tape.peak = tape.live
        grads = tape.run_backward(output)
        above = max(tape.peak, forward_peak if recomputed else 0) - kept
        # A reduction may make the gradients float32.
        layer_grads = grads * self.reduced_itemsize // self.full_itemsize if self.trains_weights else 0
        layers = self.elements.layers
        places = {"last layer, backward": 0, "first layer, backward": layers - 1}
        if self.rank.gathers:
            # Moments at which the next layer's gradients are reduced and the previous layer is prefetched.
            places |= {"last layer but one, backward": 1, "second layer, backward": layers - 2}
        for name, behind in places.items():
            if not 0 <= behind < layers:
                continue
            comm = self._comm_terms(layers - behind, layers=1, fetched=behind < layers - 1, reduced=behind > 0)
            yield self._moment(
                name, comm, activations=sum(self.kept[: layers - behind]) + other_bytes + recomputed + above,
                gradients=accumulated or behind * layer_grads, waiting=0 if accumulated else head_grad,
                logits=self._kept_logits,
            )  # fmt: skip

    def _embedding_moments(self, other_bytes: int, head_grad: int) -> Iterator[PeakMoment]:
        rank, elements = self.rank, self.elements
        # The gradient of a tied embedding is added to the head's out of place.
        tied = self.g.tied and rank.tensor == rank.stages == 1
        extra = (1 if self.plan.chunked_loss and rank.gathers else 2) * head_grad if tied else 0
        root, own = (
            elements.root * itemsize * rank.gathers for itemsize in (self.reduced_itemsize, self.full_itemsize)
        )
        yield self._moment(
            "embedding, backward",
            self._comm_terms(reduced=int(rank.gathers)),
            activations=other_bytes + self.hidden_bytes, gradients=max(self.memory.gradients - root, 0),
            waiting=own + extra, logits=self._kept_logits,
        )  # fmt: skip
        if not rank.gathers:
            return
        comm = self._comm_terms(root=0)
        comm["communication"] = comm.get("communication", 0) + root
        yield self._moment(
            "reduction of the root", comm,
            activations=other_bytes, gradients=self.memory.gradients, waiting=own, logits=self._kept_logits,
        )  # fmt: skip
