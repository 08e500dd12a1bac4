"""Which figures of case study 3 hold, and the right ones: every number here is computed, measured or out of a run."""

from __future__ import annotations

from typing import NamedTuple

import torch
from precision import Deviations
from runs import analysis, build, largest_batch, weight_bytes
from specs import AFTER, BEFORE, DEVIATIONS, GPUS, KEPT_LAYERS, RECOMMENDED, SIZES, TRAINING

import memprof
from memprof.device.catalog import find_gpu
from memprof.flows.account import analyze
from memprof.flows.profile import profile
from memprof.report.documents.report import Report
from memprof.spec import TargetSpec
from memprof.units import GIB, format_bytes


class Claim(NamedTuple):
    """A sentence of the guide, whether it holds, and what is right."""

    text: str
    verdict: str
    right: str


class Size(NamedTuple):
    """A row of the guide's table of sizes."""

    dtype: str
    weight_bytes: int
    one: int
    """Device memory that a forward of one sample needs."""
    sixteen: int
    """Of sixteen samples, the guide's batch."""


class Gpu(NamedTuple):
    """A row of the guide's table of GPUs."""

    name: str
    dtype: str
    total_bytes: int
    needed_bytes: int
    fits: bool
    """Sixteen samples."""
    largest: int
    """The largest power of two that fits, 16 to 128; 0 if 16 does not."""
    trains: bool
    """Whether a training step of one sample fits."""


class Step(NamedTuple):
    """One advice, from the same run: float32, 16 samples, on the guide's GPU of 8 GB."""

    advice: str
    document: Report


def sizes() -> list[Size]:
    """The table of sizes, simulated."""
    rows = []
    for dtype in SIZES:
        int8 = dtype == "int8"
        spec = BEFORE.edit(dtype="float16" if int8 else dtype)
        with memprof.virtual_gpu(spec.gpu, alloc_conf=""):
            num_bytes = weight_bytes(build(spec, int8))
        one, sixteen = (
            analysis(spec.edit(batch_size=batch), 2 * batch, int8=int8).report().verdict.required_bytes
            for batch in (1, 16)
        )
        rows.append(Size(dtype, num_bytes, one, sixteen))
    return rows


def gpus() -> list[Gpu]:
    """The table of GPUs, simulated."""
    rows = []
    for name, dtype in RECOMMENDED.items():
        spec = BEFORE.edit(gpu=name, dtype=dtype, steps=1)
        verdict = profile(spec)[1].verdict
        trains = profile(TRAINING.edit(gpu=name, dtype=dtype))[1].verdict.fits
        rows.append(
            Gpu(
                find_gpu(name).name.removeprefix("NVIDIA ").removeprefix("GeForce "),
                dtype,
                find_gpu(name).total_bytes,
                verdict.required_bytes,
                verdict.fits is True,
                largest_batch(spec) if verdict.fits else 0,
                trains is True,
            )
        )
    return rows


def steps() -> list[Step]:
    """The guide's advice on an out-of-memory error, in its order, and what else there is."""

    def run(spec: TargetSpec, samples: int = 32, **options: object) -> Report:
        return analysis(spec, samples, **options).report()

    return [
        Step("baseline", run(BEFORE)),
        Step("1. float16", run(AFTER)),
        Step("2. half as many samples", run(BEFORE, 16)),
        Step("4. empty_cache() before each batch", run(BEFORE, empty_cache=True)),
        Step("bfloat16", run(BEFORE.edit(dtype="bfloat16"))),
        Step("batch 8", run(BEFORE.edit(batch_size=8))),
        Step("logits of the last token alone", run(BEFORE, logits_to_keep=1)),
        Step("no KV cache", run(BEFORE, use_cache=False)),
        Step("float16, batch 8, last logits", run(AFTER.edit(batch_size=8), logits_to_keep=1, use_cache=False)),
    ]


def claims(size_rows: list[Size], gpu_rows: list[Gpu], deviations: dict[str, Deviations]) -> list[Claim]:
    """The guide's figures."""
    return [*_size_claims(size_rows), *_gpu_claims(gpu_rows), *_loop_claims(), *_precision_claims(deviations)]


def _size_claims(rows: list[Size]) -> list[Claim]:
    by_dtype = {row.dtype: row for row in rows}
    parameters = by_dtype["float32"].weight_bytes / 4
    plain = all(
        abs(by_dtype[dtype].weight_bytes / parameters * 1.2 - SIZES[dtype]) < 0.05 for dtype in SIZES if dtype != "int8"
    )
    int8, half = by_dtype["int8"], by_dtype["float16"]
    enough = {
        dtype: ("yes" if row.one <= GPUS[dtype] * GIB else "no", "yes" if row.sixteen <= GPUS[dtype] * GIB else "no")
        for dtype, row in by_dtype.items()
    }
    training = profile(TRAINING)[1]
    share = 1 - half.sixteen / by_dtype["float32"].sixteen
    return [
        Claim(
            "1.2B parameters: 4.8 GB, 2.4 GB, 2.4 GB",
            "holds" if plain else "does not hold",
            f"parameters x bytes; {parameters / 1e9:.2f}B here: {format_bytes(by_dtype['float32'].weight_bytes)} and "
            f"{format_bytes(half.weight_bytes)}",
        ),
        Claim(
            "int8: 1.2 GB",
            "holds" if int8.weight_bytes < 1.25 / 1.2 * parameters else "does not hold",
            f"{int8.weight_bytes / 1e9 * 1.2e9 / parameters:.2f} GB: load_in_8bit makes int8 of the layers' matrices; "
            f"the embedding, which is the head too, stays in 16 bits ({format_bytes(int8.weight_bytes)} here)",
        ),
        Claim(
            "GPUs of 8, 4, 4 and 2 GB",
            "for one sample at best" if any(sixteen == "no" for _, sixteen in enough.values()) else "holds",
            "; ".join(f"{dtype} 1 sample {one}, 16 samples {sixteen}" for dtype, (one, sixteen) in enough.items())
            + " (of 512 tokens, CUDA context included)",
        ),
        Claim(
            "float16 saves 50% of memory",
            "holds" if abs(share - 0.5) < 0.03 else "does not hold",
            f"{share:.0%} of what 16 samples need on the GPU; weights, activations and logits halve, the CUDA context "
            "does not",
        ),
        Claim(
            "overhead for gradients and optimizer state is a note",
            "it is most of a training step" if training.peak.allocated_bytes > 3 * 4 * parameters else "holds",
            f"one sample in float32 with AdamW: {format_bytes(training.verdict.required_bytes)}, "
            f"{training.verdict.required_bytes / (4 * parameters):.1f} times the weights",
        ),
    ]


def _gpu_claims(rows: list[Gpu]) -> list[Claim]:
    fails = [row.name for row in rows if not row.fits]
    trains = [row.name for row in rows if row.trains]
    native = all(find_gpu(name).compute_capability >= (8, 0) for name in RECOMMENDED if name.startswith("rtx-3"))
    return [
        Claim(
            "settings per GPU",
            "hold, for forwards" if not fails else "do not hold for " + ", ".join(fails),
            f"16 samples fit on {len(rows) - len(fails)} of {len(rows)}; a training step of one sample fits only on "
            + ", ".join(trains),
        ),
        Claim(
            "bfloat16: native on RTX 30 and later",
            "holds" if native and find_gpu("v100-16gb").compute_capability < (8, 0) else "does not hold",
            "compute capability 8.6; a V100 has 7.0",
        ),
    ]


def _loop_claims() -> list[Claim]:
    few, many = (analysis(AFTER, samples).report().peak for samples in (32, 96))
    kept_few, kept_many = (
        analysis(AFTER.edit(gpu="a100-80gb"), samples, keep=KEPT_LAYERS).report().peak.allocated_bytes
        for samples in (32, 96)
    )
    per_sample = (kept_many - kept_few) // 64
    on_host = analysis(AFTER, 96, keep=KEPT_LAYERS, keep_on="cpu").report().peak.allocated_bytes
    before, emptied = (analysis(BEFORE, 32, empty_cache=empty).report().verdict for empty in (False, True))
    same = before.oom_stage == emptied.oom_stage and before.tried_to_allocate_bytes == emptied.tried_to_allocate_bytes
    trace = analysis(AFTER, 112, lengths=(100, 512, 317, 420, 233, 480, 64)).trace
    default, expandable = (analyze(trace, conf).peak for conf in ("", "expandable_segments:True"))
    with memprof.virtual_gpu(AFTER.gpu, alloc_conf="") as gpu:
        model = build(AFTER)
        shown = torch.cuda.memory_allocated() / 1024**3
        resident = gpu.allocated_bytes
        del model
    return [
        Claim(
            "fewer samples against out of memory",
            "no effect" if few.allocated_bytes == many.allocated_bytes else "holds",
            f"32 and 96 samples in batches of 16 have the same peak, {format_bytes(many.allocated_bytes)}. Only if "
            f"outputs of layers {', '.join(map(str, KEPT_LAYERS))} stay on the GPU do samples count: "
            f"{format_bytes(per_sample)} each, {format_bytes(10_000 * per_sample)} for 10,000; copied to the host: "
            f"{format_bytes(on_host)} at the peak",
        ),
        Claim(
            "empty_cache() against out of memory",
            "no effect" if same else "holds",
            f"the same request of {format_bytes(emptied.tried_to_allocate_bytes or 0)} is refused: before it gives up, "
            "the allocator empties its cache itself",
        ),
        Claim(
            "expandable_segments against fragmentation",
            "holds" if expandable.reserved_bytes < default.reserved_bytes else "no effect here",
            f"samples of 64 to 512 tokens: {format_bytes(default.reserved_bytes)} reserved for "
            f"{format_bytes(default.allocated_bytes)}, and {format_bytes(expandable.reserved_bytes)} with it",
        ),
        Claim(
            "memory_allocated() / 1024**3 is in GB",
            "it is GiB" if abs(shown * GIB - resident) < 0.001 * resident else "does not hold",
            f"the float16 weights show as {shown:.2f}, and are {resident / 1e9:.2f} GB; what is called cached is "
            "memory_reserved(), and nvidia-smi shows that and the CUDA context",
        ),
        Claim("CPU: 10-50x slower", "cannot be checked", "neither CPU nor GPU is named"),
    ]


def _precision_claims(found: dict[str, Deviations]) -> list[Claim]:
    rows = []
    for dtype, (deviation, match) in DEVIATIONS.items():
        mine = found[dtype]
        unit = torch.finfo(getattr(torch, dtype)).eps / 2
        same, count = mine.agreement
        rows.append(
            Claim(
                f"{dtype}: activations deviate by < {deviation}%, {match}% of features match",
                "does not hold" if mine.least > deviation / 100 else "holds",
                f"{mine.least:.2%} to {mine.most:.2%} in the layers ({100 * mine.least / deviation:.0f} to "
                f"{100 * mine.most / deviation:.0f} times as much), {mine.logits:.2%} in the logits; one "
                f"rounding alone is up to {unit:.3%}. Likeliest token the same at {same} of {count} positions. What a "
                "matching feature is, the guide does not say",
            )
        )
    ratio = found["bfloat16"].most / found["float16"].most
    rows.append(
        Claim(
            "bfloat16 deviates less than float16",
            "does not hold" if ratio > 1 else "holds",
            f"{ratio:.0f} times as much: it has 8 bits of precision and float16 has 11. Its stability is of range: "
            f"float16 ends at {torch.finfo(torch.float16).max:,.0f}, bfloat16 at {torch.finfo(torch.bfloat16).max:.1e}",
        )
    )
    return rows
