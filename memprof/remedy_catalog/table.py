"""The table of remedies."""

from __future__ import annotations

from memprof.remedy_catalog.remedy import VALUE, Numerics, Remedy, Tier

_HALF_CONFLICTS = dict.fromkeys(("amp-bfloat16", "amp-float16"), "autocast is for parameters in float32")
_ONE_OPTIMIZER = "a parameter has one optimizer"
_ON_THE_CARD = {"cpu-offload-weights": "quantized weights and their scales stay together on the card"}
_OPTIMIZER = "a function from a list of parameters to an optimizer"
_NO_OPTIMIZER = {"optimizer": ("none", "there is no optimizer")}
_FOUR_BITS = {
    "quant_type": "'nf4' or 'fp4'; nf4 if not given",
    "double_quant": "whether the scales are quantized in turn; True if not given",
}
_LORA = {
    "lora_rank": "of the matrices; 8 if not given",
    "lora_targets": "names of the modules to adapt; PEFT's for the architecture if not given",
}
_EVERY_TIER = tuple(Tier)
_BUT_STREAMED_WEIGHTS = tuple(tier for tier in Tier if tier is not Tier.STREAMED_WEIGHTS)
_SAME_UPDATES = (Tier.EXACT, Tier.AUTOCAST, Tier.HALF_WEIGHTS)
_WEIGHTS = ("parameters", "gradients", "optimizer state")
_EDITS = "memprof.remedies.spec_edits"
_IN = "memprof.remedies"

_TABLE = (
    Remedy(
        name="expandable-segments", numerics=Numerics.EXACT, saves=("fragmentation",),
        changes="the caching allocator grows its segments in place instead of asking for others",
        cost="none to speak of; for the whole process, and what is on the card already stays where it is",
        install=f"{_IN}.expandable_segments:install", alloc_conf="expandable_segments:True",
        ladder=20, outside=30, search=40, tiers=_EVERY_TIER, helps={"fragmentation": 10},
    ),
    Remedy(
        name="device-placement", numerics=Numerics.EXACT, saves=(),
        changes="tensors that modules hold or make on another device than their parameters' are moved, and made there",
        cost="what is moved takes bytes on the card; so does what a forward makes without naming a device",
        install=f"{_IN}.device_placement:install",
        options={"keep_on_host": "patterns of names of tensors that stay where they are; * stands for anything"},
        conflicts={"cpu-offload-weights": "its layers are in host memory on purpose"},
        ladder=10, search=10, tiers=_BUT_STREAMED_WEIGHTS, helps={"device-mismatch": 10},
    ),
    Remedy(
        name="bfloat16", numerics=Numerics.APPROXIMATE, saves=(*_WEIGHTS, "activations", "logits and loss"),
        changes="parameters in bfloat16",
        cost="8 bits of precision; updates below 1/256 of a weight are lost without float32 masters",
        install=f"{_IN}.precision:install", bench="precision",
        conflicts={"float16": "a model has one dtype", **_HALF_CONFLICTS}, edit=f"{_EDITS}:half",
        on=lambda spec: spec.dtype == "bfloat16", for_float32=True,
        ladder=135, search=120, tiers=(Tier.HALF_WEIGHTS,),
        helps={"parameters": 15, "doctor: weights": 10, "doctor: smaller": 10},
        words={"doctor: smaller": "parameters and activations in half precision, if they are float32 (autocast: "
               "amp-bfloat16)"},
    ),
    Remedy(
        name="float16", numerics=Numerics.APPROXIMATE, saves=(*_WEIGHTS, "activations", "logits and loss"),
        changes="parameters in float16",
        cost="numbers above 65,504 overflow and gradients below 6e-8 vanish: scale the loss",
        install=f"{_IN}.precision:install", bench="precision",
        conflicts={"bfloat16": "a model has one dtype", **_HALF_CONFLICTS}, edit=f"{_EDITS}:half",
        on=lambda spec: spec.dtype == "float16",
    ),
    Remedy(
        name="amp-bfloat16", numerics=Numerics.APPROXIMATE, saves=("activations", "logits and loss"),
        changes="the forward under autocast: products in bfloat16, parameters in float32",
        cost="8 bits of precision in products; half copies of the weights during the forward",
        install=f"{_IN}.autocast:install", bench="precision", conflicts={"amp-float16": "autocast has one dtype"},
        edit=f"{_EDITS}:autocast", on=lambda spec: spec.amp == "bfloat16",
        for_float32=True, ladder=95, outside=60, search=120, tiers=(Tier.AUTOCAST,),
        helps={"activations": 20, "logits and loss": 30},
    ),
    Remedy(
        name="amp-float16", numerics=Numerics.APPROXIMATE, saves=("activations", "logits and loss"),
        changes="the forward under autocast: products in float16, parameters in float32",
        cost="gradients below 6e-8 vanish: scale the loss with the GradScaler that is the result",
        install=f"{_IN}.autocast:install", bench="precision",
        conflicts={
            "amp-bfloat16": "autocast has one dtype",
            "optimizer-in-backward": "parameters would be updated with scaled gradients",
        },
        edit=f"{_EDITS}:autocast", on=lambda spec: spec.amp == "float16",
    ),
    Remedy(
        name="vocabulary-cap", numerics=Numerics.DIFFERENT, saves=(*_WEIGHTS, "logits and loss"),
        changes="embedding and head keep their first tokens",
        cost="token ids at or above the cap cannot be used any more",
        install=f"{_IN}.vocabulary:install", options={"vocab_size": "tokens that stay"},
        main_option="vocab_size", required=("vocab_size",), trains_another=True, edit=f"{_EDITS}:vocabulary_cap",
        helps={"logits and loss": 20, "vocabulary-larger-than-asked": 10},
    ),
    Remedy(
        name="8-bit-weights", numerics=Numerics.APPROXIMATE, saves=_WEIGHTS,
        changes="linear layers but the head in bitsandbytes' LLM.int8: one byte a weight, frozen",
        cost="rounded weights and activations; the quantized layers do not learn",
        install=f"{_IN}.quantized_weights:install_8_bit",
        packages=("bitsandbytes",), trains_another=True, bench="quantized weights",
        conflicts={
            "4-bit-weights": "weights are quantized once",
            "qlora": "its weights are in 4 bits",
            **_ON_THE_CARD,
        },
        edits={"quantize": "int8"}, built_so=True,
        on=lambda spec: spec.adapter is None and spec.quantize == "int8",
    ),
    Remedy(
        name="4-bit-weights", numerics=Numerics.APPROXIMATE, saves=_WEIGHTS,
        changes="linear layers but the head in bitsandbytes' 4-bit format: half a byte a weight, frozen",
        cost="16 values a weight; each is unpacked for its product; the quantized layers do not learn",
        install=f"{_IN}.quantized_weights:install_4_bit", options=_FOUR_BITS,
        packages=("bitsandbytes",), trains_another=True, bench="quantized weights",
        conflicts={"qlora": "it quantizes the weights itself", **_ON_THE_CARD},
        edits={"quantize": "nf4"}, built_so=True,
        on=lambda spec: spec.adapter is None and spec.quantize in ("nf4", "fp4"),
        helps={"doctor: weights": 20, "doctor: spilled": 10},
    ),
    Remedy(
        name="qlora", numerics=Numerics.APPROXIMATE, saves=_WEIGHTS,
        changes="weights in 4 bits, and PEFT's trained matrices beside them",
        cost="16 values a weight; only the adapter learns",
        install=f"{_IN}.quantized_weights:install_qlora", options={**_FOUR_BITS, **_LORA},
        main_option="lora_rank", packages=("bitsandbytes", "peft"), training_only=True, trains_another=True,
        conflicts={
            "lora": "it attaches LoRA itself",
            "freeze": "LoRA freezes the whole model itself",
            **_ON_THE_CARD,
        },
        edits={"quantize": "nf4", "adapter": "lora", "lora_rank": VALUE}, built_so=True,
        on=lambda spec: spec.adapter == "lora" and spec.quantize is not None,
        ladder=150, search=110, tiers=(Tier.QUANTIZED_ADAPTER,), helps={"doctor: parameters": 30},
    ),
    Remedy(
        name="freeze", numerics=Numerics.DIFFERENT, saves=("gradients", "optimizer state"),
        changes="parameters that are not trained",
        cost="what is frozen does not learn",
        install=f"{_IN}.trained:install_freeze",
        options={"frozen": "patterns of parameter names, such as 'model.embed*'; * stands for anything"},
        main_option="frozen", main_type=str, required=("frozen",), training_only=True, trains_another=True,
        edits={"freeze": VALUE}, on=lambda spec: spec.freeze is not None,
    ),
    Remedy(
        name="lora", numerics=Numerics.DIFFERENT, saves=("gradients", "optimizer state"),
        changes="small trained matrices beside a frozen model, put there by PEFT",
        cost="only the adapter learns",
        install=f"{_IN}.trained:install_lora", options=_LORA,
        main_option="lora_rank", packages=("peft",), training_only=True, trains_another=True,
        conflicts={"freeze": "LoRA freezes the whole model itself"}, edits={"adapter": "lora", "lora_rank": VALUE},
        on=lambda spec: spec.adapter == "lora" and spec.quantize is None,
        ladder=140, search=110, tiers=(Tier.ADAPTER,),
        helps={"optimizer state": 30, "gradients": 10, "parameters": 10, "doctor: smaller": 50},
    ),
    Remedy(
        name="low-rank-npt", numerics=Numerics.EXACT, saves=("activations", "temporaries"),
        changes="NPT components never make a weight delta: h W + ((h A) * m) B",
        cost="none: it is faster",
        install=f"{_IN}.npt:install_low_rank", for_models="npt",
        conflicts={"cpu-offload-npt-delta": "without a delta there is nothing to offload"},
        edit=f"{_EDITS}:low_rank_npt", on=lambda spec: spec.npt == "low-rank",
        ladder=30, search=20, tiers=_EVERY_TIER, helps={"weight-delta-per-token": 10, "doctor: weight delta": 10},
    ),
    Remedy(
        name="sdpa-attention", numerics=Numerics.EXACT, saves=("activations",),
        changes="torch's scaled_dot_product_attention instead of scores kept in memory",
        cost="none: it is faster; no attention weights can be returned",
        install=f"{_IN}.attention:install", ladder=50, outside=50, search=30, tiers=_EVERY_TIER,
        helps={"attention-scores": 10, "doctor: attention": 10},
        words={"doctor: attention": "attention that keeps no scores: attn_implementation='sdpa'"},
    ),
    Remedy(
        name="chunked-loss", numerics=Numerics.EXACT, saves=("logits and loss",),
        changes="the loss is computed some tokens at a time: the full logits never exist",
        cost="one more product with the head's weight: a third of the head's time",
        install=f"{_IN}.chunked_loss:install",
        options={
            "chunk_size": "tokens whose logits exist at a time; chosen from chunk_bytes if not given",
            "chunk_bytes": "bytes that a chunk of logits may take; 1 GiB if not given",
            "threshold": "bytes of full logits below which nothing is chunked, or 'auto'; 0 if not given",
            "head": "name of the head, where the model does not tell",
        },
        main_option="chunk_size", training_only=True,
        ladder=60, outside=10, search=50, tiers=_EVERY_TIER, ladder_against=("temporaries",),
        helps={"logits and loss": 10, "doctor: logits": 10},
        words={"doctor: logits": "compute the loss in chunks: the full logits never exist"},
    ),
    Remedy(
        name="activation-checkpointing", numerics=Numerics.EXACT, saves=("activations",),
        changes="layers keep their inputs alone and run again in the backward",
        cost="one more forward of what is checkpointed",
        install=f"{_IN}.checkpointing:install",
        options={
            "every": "checkpoint every n-th layer; 1 if not given",
            "modules": "checkpoint the modules of these names instead; * stands for anything",
            "policy": "'selective' keeps the results of matrix products and attention, and runs the rest again; "
            "'full' keeps nothing; full if not given",
        },
        main_option="every", training_only=True, on=lambda spec: spec.activation_checkpointing,
        ladder=100, outside=20, search=90, tiers=_BUT_STREAMED_WEIGHTS,
        helps={"activations": 10, "doctor: activations": 10, "doctor: smaller": 30},
    ),
    Remedy(
        name="cpu-offload-activations", numerics=Numerics.EXACT, saves=("activations",),
        changes="what layers keep for the backward waits in host memory",
        cost="every such byte crosses the bus twice in a step",
        install=f"{_IN}.offload_activations:install",
        options={"min_bytes": "tensors below this stay on the card; 1 MiB if not given"},
        main_option="min_bytes", training_only=True, ladder=130, outside=70, search=100, tiers=_BUT_STREAMED_WEIGHTS,
    ),
    Remedy(
        name="cpu-offload-npt-delta", numerics=Numerics.EXACT, saves=("activations",),
        changes="the weight delta of an NPT component waits in host memory between forward and backward",
        cost="every delta crosses the bus twice in a step; one is still on the card at a time",
        install=f"{_IN}.npt:install_offload", for_models="npt",
        conflicts={"activation-checkpointing": "layers that run again keep no delta"}, ladder=40,
    ),
    Remedy(
        name="cpu-offload-weights", numerics=Numerics.EXACT, saves=("parameters", "gradients", "activations"),
        changes="the weights of a layer are on the card while it runs, in host memory otherwise",
        cost="the weights cross the bus twice in a step, their gradients once; layers run again in the backward",
        install=f"{_IN}.offload_weights:install", makes_room_first=True,
        conflicts={
            "activation-checkpointing": "it runs the layers again in the backward itself",
            "cpu-offload-activations": "it keeps nothing but the layers' inputs",
            "optimizer-in-backward": "gradients of offloaded weights arrive in host memory after the layer's backward",
        },
        search=110, tiers=(Tier.STREAMED_WEIGHTS,), helps={"gradients": 20, "parameters": 20, "doctor: smaller": 70},
    ),
    Remedy(
        name="micro-batch", numerics=Numerics.EXACT, saves=("activations", "logits and loss", "inputs"),
        changes="a batch goes through forward and backward some rows at a time; gradients add up to those of the whole",
        cost="kernels work on fewer rows: slower where these do not fill the card",
        install=f"{_IN}.micro_batch:install",
        options={
            "micro_batch_size": "rows at a time; 1 if not given",
            "shift_labels": "whether the model's loss compares each position with the next label; found out if not "
            "given",
            "ignore_index": "label that the loss leaves out; -100 if not given",
            "loss": "a function from the model's outputs and the batch to the loss; the outputs' own if not given",
        },
        main_option="micro_batch_size",
        conflicts={"optimizer-in-backward": "it steps after each micro-batch, and not after the last"},
        edit=f"{_EDITS}:micro_batch",
        useless_if={"batch_size": (1, "there is one sequence in a micro-batch already")},
        ladder=90, search=80, tiers=_EVERY_TIER, ladder_against=("temporaries", "KV cache"),
        helps={
            **dict.fromkeys(("logits and loss", "activations", "KV cache", "inputs", "temporaries"), 90),
            "weight-delta-per-token": 90,
            "attention-scores of sdpa": 10,
            "doctor: smaller": 20,
        },
        words={"doctor: smaller": "fewer rows at a time, gradients added up: the same step"},
    ),
    Remedy(
        name="streamed-batches", numerics=Numerics.EXACT, saves=("host memory",),
        changes="batches are made one at a time instead of all of them before training",
        cost="each batch is put together while the card waits, unless workers do it",
        install=f"{_IN}.streamed_batches:install",
        options={
            "dataset": "the samples: a Dataset, a list, a tensor, or a dictionary of tensors by sample",
            "batch_size": "samples of a batch; 1 if not given",
        },
        required=("dataset",), training_only=True, edits={"dataset_batches": None}, on=lambda spec: False,
        useless_if={"dataset_batches": (None, "batches are made one at a time already")},
        helps={"doctor: host memory": 10},
    ),
    Remedy(
        name="fused-optimizer", numerics=Numerics.EXACT, saves=("temporaries",),
        changes="an optimizer step is one kernel for many parameters, which needs no temporaries",
        cost="none: it is faster",
        install=f"{_IN}.fused_optimizer:install",
        options={"optimizer": _OPTIMIZER + ", or an optimizer that is there; AdamW at 1e-4 if not given"},
        training_only=True,
        conflicts={
            "optimizer-in-backward": "give that a fused one: optimizer=lambda p: torch.optim.AdamW(p, fused=True)",
            "8-bit-optimizer": _ONE_OPTIMIZER,
            "cpu-offload-optimizer": _ONE_OPTIMIZER,
        },
        edits={"optimizer_impl": "fused"}, ladder=70, outside=40, search=70, tiers=_SAME_UPDATES,
        helps={"optimizer-step-temporaries": 10},
    ),
    Remedy(
        name="cpu-offload-optimizer", numerics=Numerics.EXACT, saves=("optimizer state", "temporaries"),
        changes="optimizer state and the step in host memory; the card has parameters and gradients alone",
        cost="gradients and parameters cross the bus once a step each; the CPU computes the step",
        install=f"{_IN}.offload_optimizer:install",
        options={
            "optimizer": _OPTIMIZER + "; AdamW at 1e-4 if not given",
            "offload_gradients": "True: gradients go to host memory, and are freed, as soon as they are there",
        },
        training_only=True,
        conflicts={
            "optimizer-in-backward": _ONE_OPTIMIZER,
            "8-bit-optimizer": _ONE_OPTIMIZER,
            "cpu-offload-weights": "any optimizer over layers in host memory steps there",
        },
        useless_if=_NO_OPTIMIZER, ladder=120, search=110, tiers=(Tier.CPU_OPTIMIZER,),
        helps={"optimizer state": 20, "doctor: parameters": 10, "doctor: smaller": 60},
    ),
    Remedy(
        name="optimizer-in-backward", numerics=Numerics.EXACT, saves=("gradients",),
        changes="each parameter is updated as soon as its gradient is there, and the gradient freed",
        cost="no gradient accumulation, clipping by norm or loss scaling",
        install=f"{_IN}.backward_optimizer:install", options={"optimizer": _OPTIMIZER},
        required=("optimizer",), training_only=True, accumulates=False,
        useless_if=_NO_OPTIMIZER,
        ladder=80, search=60, tiers=_SAME_UPDATES,
    ),
    Remedy(
        name="8-bit-optimizer", numerics=Numerics.APPROXIMATE, saves=("optimizer state",),
        changes="AdamW whose two states take one byte per parameter each",
        cost="states are quantized in blocks",
        install=f"{_IN}.eight_bit:install", options={"learning_rate": "1e-4 if not given"},
        packages=("bitsandbytes", "torchao"), training_only=True, bench="optimizer",
        conflicts={"optimizer-in-backward": "give that the 8-bit optimizer: optimizer=bitsandbytes.optim.AdamW8bit"},
        edit=f"{_EDITS}:eight_bit_optimizer", on=lambda spec: "8bit" in spec.optimizer,
        ladder=110, search=110, tiers=(Tier.QUANTIZED_STATES,),
        helps={
            "optimizer state": 10,
            "float32-optimizer-state": 10,
            "optimizer-step-temporaries": 20,
            "doctor: parameters": 20,
            "doctor: smaller": 40,
        },
    ),
)  # fmt: skip

REMEDIES: dict[str, Remedy] = {remedy.name: remedy for remedy in _TABLE}
"""In the order in which they are switched on, whatever the order in which they were named."""
