"""Which figures of case study 2 hold, and the right ones: every number here is computed, measured or out of a run."""

from __future__ import annotations

from typing import NamedTuple

import vocabulary
from batches import BATCH, TOKENS, simulated_bytes
from specs import AFTER, BATCH_OF_8, BEFORE, EAGER, NOT_CAPPED

from memprof.findings import Finding
from memprof.findings.lifetimes import Lifetimes
from memprof.flows.gpus import find_spec_gpu
from memprof.flows.profile import profile
from memprof.flows.vocabulary.frequencies import Frequencies
from memprof.ledger.categories import Category
from memprof.ledger.ledger import build_ledger
from memprof.report.documents.report import Report
from memprof.spec import TargetSpec
from memprof.trace.events import Role, Trace
from memprof.units import GIB, format_bytes
from memprof.workload.catalog import find_model

WIDTH = 512
CATEGORIES = (
    Category.PARAMETERS,
    Category.GRADIENTS,
    Category.OPTIMIZER_STATE,
    Category.ACTIVATIONS,
    Category.LOGITS_AND_LOSS,
)


class Claim(NamedTuple):
    """A sentence of the report, whether it holds, and what is right."""

    text: str
    verdict: str
    right: str


class Run(NamedTuple):
    """One specification that was run."""

    document: Report
    most: dict[str, int]
    """The most bytes that each category takes at one moment."""
    parameters: dict[str, int]
    """Numbers in each parameter, by name."""

    @property
    def num_parameters(self) -> int:
        """Of the whole model."""
        return sum(self.parameters.values())

    def part(self, pattern: str) -> int:
        """Numbers in the parameters whose name contains `pattern`."""
        return sum(count for name, count in self.parameters.items() if pattern in name)

    @property
    def peak_bytes(self) -> int:
        """The most that is allocated."""
        return self.document.peak.allocated_bytes


def run(spec: TargetSpec) -> Run:
    """Profile `spec` and take its memory apart."""
    trace, document = profile(spec)
    ledger = build_ledger(trace)
    lives = Lifetimes(ledger)
    storages: dict[Category, list[int]] = {category: [] for category in CATEGORIES}
    for index, category in enumerate(ledger.categories):
        if category in storages and trace.storages[index].device != "cpu":
            storages[category].append(index)
    most = {category.value: lives.find_max_live(indices).num_bytes for category, indices in storages.items()}
    return Run(document, most, parameter_counts(trace))


def parameter_counts(trace: Trace) -> dict[str, int]:
    """Numbers in each parameter of a float32 model, by name."""
    return {
        owner.name: trace.storages[index].num_bytes // 4
        for index, owner in trace.owners.items()
        if owner.role is Role.PARAMETER and trace.storages[index].device != "cpu"
    }


def largest_batch(spec: TargetSpec) -> int:
    """The largest batch that fits the GPU of `spec`: simulated, and the next one does not."""

    def required(batch_size: int) -> tuple[int, bool]:
        verdict = profile(spec.edit(batch_size=batch_size))[1].verdict
        return verdict.required_bytes, bool(verdict.fits)

    # Memory grows evenly with the batch, but for rounding: two runs say about where to look.
    (few, _), (more, _) = required(64), required(128)
    each = (more - few) / 64
    total = find_spec_gpu(spec).total_bytes
    batch_size = 128 + int((total - more) / each)
    while not required(batch_size)[1]:
        batch_size -= 1
    while required(batch_size + 1)[1]:
        batch_size += 1
    return batch_size


def the_fault() -> tuple[Run, Finding]:
    """The model whose code ignores the vocabulary that is requested, and what memprof finds."""
    fault = run(NOT_CAPPED)
    return fault, next(f for f in fault.document.findings if f.id == "vocabulary-larger-than-asked")


def words() -> tuple[int, float]:
    """Different words of the synthetic corpus, and the share of its text that the report's cap covers."""
    found = Frequencies.of(vocabulary.Counter(vocabulary.synthetic_corpus()).values())
    return found.distinct, found.compute_coverage((AFTER.vocab_size or 0) - 1)  # one row is for all that is rare


def holds(condition: bool) -> str:
    """The plain verdict."""
    return "holds" if condition else "does not hold"


def million(count: int) -> str:
    """As the report counts."""
    return f"{count / 1e6:.1f}M"


def model_claims(before: Run, after: Run) -> list[Claim]:
    """The report's figures on the model and its vocabulary."""
    published = find_model("pythia-70m")
    layer = after.part("layers.0.")
    layers = after.part("layers.")
    positions = after.part("pos") + after.part("wpe")
    tables = before.part("embed_in"), before.part("embed_out") + before.part("lm_head")
    return [
        Claim(
            "a token for each word of WikiText-2: 30K to 50K and more",
            "holds at the lower end",
            f"{vocabulary.WIKITEXT_2_WORDS:,} different words (Merity et al., 2016), whose rare ones are <unk> already",
        ),
        Claim(
            "50K words: embedding 25.6M and head 25.6M parameters",
            holds(tables == (25_600_000, 25_600_000)),
            f"{tables[0]:,} and {tables[1]:,}",
        ),
        Claim(
            "50K words: ~200M parameters instead of 70M",
            holds(before.num_parameters > 180e6),
            f"{million(before.num_parameters)}. The 70M of Pythia-70M ({published.num_parameters:,}) are with a "
            f"vocabulary of {published.vocab_size:,}: {2 * WIDTH * published.vocab_size / published.num_parameters:.0%}"
            " of them are embedding and head",
        ),
        Claim(
            "layers: 6 x 11M = 66M parameters",
            holds(round(layers / 1e6) == 66),
            f"6 x {layer:,} = {million(layers)}: 4 h^2 in attention and 8 h^2 in the MLP with h = {WIDTH}, and biases "
            "and norms",
        ),
        Claim(
            "position embeddings: 128 x 512 = 65K parameters",
            "holds" if positions == 128 * WIDTH else "not in Pythia",
            "none: Pythia turns queries and keys by their position (rotary), which has no parameters",
        ),
        Claim(
            "10K words: ~76M parameters, 304 MB in float32",
            holds(round(after.num_parameters / 1e6) == 76),
            f"{after.num_parameters:,}, {format_bytes(4 * after.num_parameters)}. Embedding and head take "
            f"{after.part('embed_in'):,} each, as the report says",
        ),
    ]


def memory_claims(before: Run, after: Run) -> list[Claim]:
    """The report's figures on memory."""
    of_8, eager = run(BATCH_OF_8), run(EAGER)
    largest = largest_batch(BEFORE)
    fixed = sum(before.most[name] for name in ("parameters", "gradients", "optimizer state"))
    as_told = 200_000_000
    scores = sum(t.allocated_bytes for t in eager.document.peak.tensors if t.op == "aten._softmax")
    at_peak = after.document.peak.categories
    activations, logits = at_peak["activations"], at_peak["logits and loss"]
    needs = after.document.verdict.required_bytes
    return [
        Claim(
            "before: 5-6 GB for the model, 40 GB and more for gradients and optimizer",
            holds(fixed > 40e9),
            f"{format_bytes(before.most['parameters'])} and "
            f"{format_bytes(fixed - before.most['parameters'])}. Even 200M parameters would take "
            f"{format_bytes(4 * as_told)} and {format_bytes(12 * as_told)}",
        ),
        Claim(
            "before: out of memory with batch 8 on 80 GB",
            holds(not of_8.document.verdict.fits),
            f"batch 8 needs {format_bytes(of_8.document.verdict.required_bytes)}, batch 32 "
            f"{format_bytes(before.document.verdict.required_bytes)}; the most that fit are {largest:,} sequences. The "
            "report's framework is not PyTorch: what filled the GPU there was its own, not the vocabulary",
        ),
        Claim(
            "after: works with batch 32 on 80 GB",
            "holds, and before too" if before.document.verdict.fits else holds(bool(after.document.verdict.fits)),
            f"{format_bytes(after.document.verdict.required_bytes)} with the CUDA context",
        ),
        Claim(
            "after: activations ~2 GB at batch 32",
            holds(1.5e9 < activations < 2.5e9),
            f"{format_bytes(activations)} at the peak. Beside them {format_bytes(logits)} of logits and loss (before: "
            f"{format_bytes(before.document.peak.categories['logits and loss'])}), which the report leaves out",
        ),
        Claim(
            "after: ~3.2 GB in one place, 5-8 GB in another",
            holds(any(low <= needs <= high for low, high in ((3.0e9, 3.4e9), (5e9, 8e9)))),
            f"{format_bytes(after.peak_bytes)} allocated at the peak, {format_bytes(needs)} of the GPU",
        ),
        Claim(
            "sparse attention (--sparse) is part of the mend",
            "saves little" if scores < 0.1 * GIB else "holds",
            f"all scores of 128 x 128 tokens take {format_bytes(scores)}, kept for the backward: with them the peak is "
            f"{format_bytes(eager.peak_bytes)}, with scaled_dot_product_attention, which keeps none, "
            f"{format_bytes(after.peak_bytes)}",
        ),
        host_claim(),
    ]


def host_claim() -> Claim:
    """What batches take that are built before training."""
    tokens = vocabulary.WIKITEXT_2_TOKENS
    built, streamed = (simulated_bytes(kind, tokens) for kind in ("built", "streamed"))
    larger = vocabulary.WIKITEXT_103_TOKENS // (BATCH * TOKENS) * 8 * (BATCH * TOKENS + 1)
    return Claim(
        "the whole dataset in batches before training begins is inefficient",
        "in host memory, and little",
        f"WikiText-2: {format_bytes(built)} of host memory, streamed {format_bytes(streamed)}, and the same on the "
        f"GPU. WikiText-103: {format_bytes(larger)}",
    )


def kernel_claims(naive_loads: int, tiled_loads: int) -> list[Claim]:
    """The report's figures on the tiled matrix product.

    Args:
        naive_loads: numbers that the naive kernel was counted to load.
        tiled_loads: the same of the tiled kernel.
    """
    return [
        Claim(
            "16 x 16 tiles in shared memory: 2-3x faster",
            "cannot be checked: no device is named",
            f"it loads {naive_loads / tiled_loads:g} times less from global memory, which caches do in part for the "
            "naive kernel too; PyTorch calls cuBLAS, which does more than that",
        ),
        Claim(
            "... is a mend for memory",
            "does not hold",
            "it is one of time: both kernels allocate the product, and nothing else",
        ),
    ]
