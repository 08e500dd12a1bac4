"""The moments of a training step, on a single GPU or on one rank of several."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from memprof.estimate.layers import DecoderLayer, kept_per_layer
from memprof.estimate.methods import MethodPlan
from memprof.estimate.projections import Setting
from memprof.estimate.ranks import Elements, Rank
from memprof.estimate.state import CUBLAS_WORKSPACE, PeakMoment, StaticMemory, Terms, positions
from memprof.estimate.tape import FLOAT32, Tape
from memprof.units import GIB

CHUNK_BYTES = GIB  # The logits that a chunked loss has at a time (fixes/chunked_loss.py, CHUNK_BYTES).


class Training:
    """The moments of a training step in the steady state: with optimizer state, and without gradients at its start."""

    def __init__(self, setting: Setting, plan: MethodPlan, held: StaticMemory, rank: Rank) -> None:
        whole = setting.geometry
        if rank.gathers and setting.amp:
            # fully_shard's mixed precision gathers half-precision parameters, so that autocast casts nothing.
            setting = dataclasses.replace(setting, amp=False, item=2)
        setting = dataclasses.replace(
            setting,
            geometry=rank.geometry(whole),
            context_length=-(-setting.context_length // rank.sequence),
            parts_heads=rank.ulysses,
        )
        self.setting, self.plan, self.rank = setting, plan, rank
        self.g = g = setting.geometry
        self.tokens = setting.tokens
        self.trains_weights = setting.trains_weights
        self.elements = elements = rank.elements(whole)
        self.held = held = self._rank_memory(held, elements, whole.num_parameters)
        self.whole_item = setting.item
        self.reduced_item = plan.item
        self.static: Terms = {
            "parameters": held.parameters // rank.parameters,
            "optimizer state": held.optimizer // rank.optimizer,
            "library workspace": 2 * CUBLAS_WORKSPACE,
        }
        self.logits_item = setting.compute_item
        self.vocab_tokens = g.vocab * self.tokens
        self.logits_bytes = self.logits_item * self.vocab_tokens
        self.hidden_bytes = g.hidden * setting.stream_item * self.tokens
        self.final = self._final_norm_bytes()
        self.kept = self._kept_per_layer()

    def _rank_memory(self, held: StaticMemory, elements: Elements, whole: int) -> StaticMemory:
        """Return the memory of the parameters that this rank computes with, unsharded."""
        if self.rank.tensor == self.rank.stages == 1:
            return held
        share = elements.all / whole
        undivided = elements.undivided * self.plan.item if self.trains_weights else 0
        parts = (held.parameters, held.trained, held.gradients, held.optimizer, held.temporaries)
        own = StaticMemory(*(round(part * share) for part in parts))
        return dataclasses.replace(own, gradients=own.gradients + undivided)

    # -- communication: gathered parameters, gradients in reduction ----------------------------------------------------

    def _comm_terms(
        self, left: int = 0, *, layers: int = 0, fetched: int = 0, reduced: int = 0, root: int = 1
    ) -> Terms:
        """Return the terms of unsharded parameters and buffers. For fully_shard: `layers` are whole,
        `fetched` prefetched, `reduced` in reduction, with the `root` or not, and `left` are whole without resharding.

        Sources: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py. The root group (embedding and head) stays
        whole from the forward to the end of the backward; a layer's gradients stay in the buffer of their reduction
        until the next layer's gradients exist.
        """
        rank, elements = self.rank, self.elements
        if rank.stages > 1:
            states = self.hidden_bytes * rank.microbatches
            return {"communication": states * (2 - rank.is_first - rank.is_last)}
        if rank.gathers:
            if not rank.reshard:
                layers, fetched = left, 0
            whole = layers * elements.layer + elements.root * root
            buffers = fetched * elements.layer * self.whole_item
            if self.trains_weights:
                buffers += reduced * elements.layer * self.reduced_item
            return {"unsharded parameters": whole * self.whole_item, "communication": buffers}
        if rank.replicas == 1:
            return {}
        if rank.gradients == 1:
            return {"communication": self.held.gradients}  # DistributedDataParallel's buckets, a second copy of them
        return {"communication": 2 * elements.layer * self.plan.item if self.trains_weights else 0}

    def _moment(
        self, name: str, comm: Terms, *, activations: int = 0, gradients: int = 0, waiting: int = 0, logits: int = 0,
        temporaries: int = 0,
    ) -> PeakMoment:  # fmt: skip
        """Return a moment with reduced `gradients`, and whole gradients that are `waiting` for their reduction."""
        terms = {
            **self.static,
            "gradients": gradients // self.rank.gradients + waiting,
            "activations": activations,
            "logits and loss": logits,
            "temporaries": temporaries,
        }
        return PeakMoment(name, terms | {term: size for term, size in comm.items() if size})

    # -- saved tensors -----------------------------------------------------------------------------------------------

    def _final_norm_bytes(self) -> int:
        tape = Tape(self.tokens, training=True)
        layer = DecoderLayer(tape, self.setting)
        hidden = tape.given(self.g.hidden, self.setting.stream_item, needs_grad=True, name="hidden states")
        out = layer.norm(hidden, "input of the head")
        tape.drop(out)
        kept = tape.kept_bytes + (hidden.num_bytes if hidden.holders > 1 else 0)
        if self.trains_weights:
            kept += self.g.hidden * self.tokens * self.setting.compute_item
        return kept

    def _cast_weight_bytes(self) -> int:
        """Return the bytes of the half-precision copies of a layer's weights under autocast."""
        if not self.setting.amp or self.plan.quantized:
            return 0
        return 2 * self.g.linear_parameters // self.g.layers

    def _kept_per_layer(self) -> list[int]:
        """Return the bytes that each layer saves for its backward."""
        g, layers = self.g, self.elements.layers
        if self.plan.method.checkpointing:
            return [self.hidden_bytes] * layers
        each = kept_per_layer(self.setting)[1] + self._cast_weight_bytes()
        needs_grad = self.trains_weights or not self.rank.is_first
        first = kept_per_layer(self.setting, hidden_needs_grad=needs_grad)[1] + self._cast_weight_bytes()
        kept = [first] + [each] * (layers - 1)
        if g.global_every and self.setting.masked:
            without = dataclasses.replace(self.setting, geometry=dataclasses.replace(g, window=0))
            each = kept_per_layer(without)[1] + self._cast_weight_bytes()
            kept[g.global_every - 1 :: g.global_every] = [each] * (layers // g.global_every)
        return kept

    def _head_copy_bytes(self) -> int:
        return 2 * self.g.vocab * self.g.hidden if self.setting.amp else 0

    def _logits_bytes(self) -> int:
        """Return the bytes of the logits, which the caller holds, and of tensors that a soft cap saves."""
        return self.logits_bytes * (2 if self.g.softcap else 1) + self._head_copy_bytes()

    # -- the moments -------------------------------------------------------------------------------------------------

    def moments(self) -> Iterator[PeakMoment]:
        """Yield the moments in the order in which a step has them."""
        rank = self.rank
        around = positions(self.setting) + 16 * self.tokens  # token ids and labels, int64
        if rank.stages == 1:
            yield from self._backward_moments(around, 0)
        else:
            # The backward of the first micro-batch begins without gradients, later ones with gradients; by then one
            # micro-batch fewer waits, unless another forward has run in between.
            waiting = self._kept_per_micro_batch()
            later = rank.in_flight - (rank.in_flight == rank.microbatches)
            yield from self._backward_moments(around + (rank.in_flight - 1) * waiting, 0)
            yield from self._backward_moments(around + max(later - 1, 0) * waiting, self.held.gradients)
        temporaries = self.held.temporaries // rank.optimizer
        comm = {} if rank.gathers else self._comm_terms()
        yield self._moment("optimizer step", comm, gradients=self.held.gradients, temporaries=temporaries)

    def _backward_moments(self, around: int, done: int) -> Iterator[PeakMoment]:
        """Yield the moments of a micro-batch's backward; other micro-batches keep `around`, and `done` in gradients."""
        rank = self.rank
        head = self.g.vocab * self.g.hidden // rank.tensor
        head_grad = head * self.whole_item if self.trains_weights and rank.is_last else 0
        if rank.is_last:
            yield from self._loss_moments(around, done, head_grad)
        yield from self._layer_moments(around, done, head_grad)
        if self.trains_weights and rank.is_first:
            yield from self._embedding_moments(around, head_grad)

    def _kept_per_micro_batch(self) -> int:
        """Return the bytes that a micro-batch of a stage saves for its backward; autocast's copies are shared."""
        kept = sum(self.kept) + 16 * self.tokens
        if not self.plan.method.checkpointing:
            kept -= self._cast_weight_bytes() * self.elements.layers
        if self.rank.is_last:
            # The logits, and their log-softmax, which the loss keeps.
            return kept + self.final + self.logits_bytes + FLOAT32 * self.vocab_tokens
        return kept + self.hidden_bytes

    def _loss_moments(self, around: int, done: int, head_grad: int) -> Iterator[PeakMoment]:
        activations = sum(self.kept) + self.final + around
        all_layers = self.elements.layers
        fetched = self._comm_terms(all_layers, fetched=1)
        if self.plan.chunked_loss:
            yield from self._chunked_loss_moments(activations, done, head_grad, fetched)
            return
        # transformers' loss works in float32 (loss/loss_utils.py): a copy of the logits, its log-softmax, and in the
        # backward the gradients of both.
        loss = FLOAT32 * self.vocab_tokens
        upcast = loss if self.logits_item < FLOAT32 else 0
        cached = self._cast_weight_bytes() * self.g.layers if self.plan.method.checkpointing else 0
        of_head = self.logits_bytes + self._head_copy_bytes() * self.trains_weights
        for name, comm, more, waiting, logits in (
            ("loss, forward", self._comm_terms(all_layers), cached + 2 * self.hidden_bytes, 0, upcast + loss),
            ("loss, backward", fetched, 0, 0, 3 * loss),
            ("head, backward", fetched, self.hidden_bytes, head_grad, of_head),
        ):
            held, logits = activations + more, self._logits_bytes() + logits
            yield self._moment(name, comm, activations=held, gradients=done, waiting=waiting, logits=logits)

    def _chunked_loss_moments(self, activations: int, done: int, head_grad: int, comm: Terms) -> Iterator[PeakMoment]:
        """Yield the moments when a chunk of logits becomes its gradient, and when the head's gradients are cast.

        fixes/head_loss.py: a chunk's size allows for the logits, their float32 copy and a float32 temporary; at most
        two of them exist, the float32 copy and the gradient in the logits' dtype. With several chunks, the head's
        gradients are summed in float32.
        """
        head = self.g.vocab * self.g.hidden // self.rank.tensor
        upcast = FLOAT32 * (self.logits_item < FLOAT32)
        rows = min(CHUNK_BYTES // (self.g.vocab * (self.logits_item + upcast + FLOAT32)), self.tokens)
        is_summed = rows < self.tokens and self.trains_weights
        summed = FLOAT32 * head if is_summed else 0
        for logits, waiting in (
            ((self.logits_item + FLOAT32) * rows, summed),
            (0 if is_summed else self.logits_item * rows, summed + head_grad),
        ):
            held, logits = activations + self.hidden_bytes, self.g.vocab * logits + self._head_copy_bytes()
            name = "loss, backward, in chunks"
            yield self._moment(name, comm, activations=held, gradients=done, waiting=waiting, logits=logits)

    @property
    def _kept_logits(self) -> int:
        """Return the bytes of the logits, which the caller keeps through the backward; lazy logits take none."""
        return 0 if self.plan.chunked_loss or not self.rank.is_last else self.logits_bytes

    def _layer_moments(self, around: int, done: int, head_grad: int) -> Iterator[PeakMoment]:
        """Yield the moments in the backward of the last layer (all activations) and of the first (all gradients)."""
        tape = Tape(self.tokens, training=True)
        hidden = tape.given(self.g.hidden, self.setting.stream_item, needs_grad=True, name="hidden states")
        output = DecoderLayer(tape, self.setting).forward(hidden)
        tape.drop(output)
        kept = tape.live
        recomputed = kept + self._cast_weight_bytes() if self.plan.method.checkpointing else 0
        forward_peak = tape.peak
        tape.peak = tape.live
        grads = tape.backward(output)
        above = max(tape.peak, forward_peak if recomputed else 0) - kept
        # A reduction may make the gradients float32.
        layer_grads = grads * self.reduced_item // self.whole_item if self.trains_weights else 0
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
                name, comm, activations=sum(self.kept[: layers - behind]) + around + recomputed + above,
                gradients=done or behind * layer_grads, waiting=0 if done else head_grad, logits=self._kept_logits,
            )  # fmt: skip

    def _embedding_moments(self, around: int, head_grad: int) -> Iterator[PeakMoment]:
        rank, elements = self.rank, self.elements
        # The gradient of a tied embedding is added to the head's out of place.
        tied = self.g.tied and rank.tensor == rank.stages == 1
        extra = (1 if self.plan.chunked_loss and rank.gathers else 2) * head_grad if tied else 0
        root, own = (elements.root * item * rank.gathers for item in (self.reduced_item, self.whole_item))
        yield self._moment(
            "embedding, backward",
            self._comm_terms(reduced=int(rank.gathers)),
            activations=around + self.hidden_bytes, gradients=max(self.held.gradients - root, 0), waiting=own + extra,
            logits=self._kept_logits,
        )  # fmt: skip
        if not rank.gathers:
            return
        comm = self._comm_terms(root=0)
        comm["communication"] = comm.get("communication", 0) + root
        yield self._moment(
            "reduction of the root", comm,
            activations=around, gradients=self.held.gradients, waiting=own, logits=self._kept_logits,
        )  # fmt: skip
