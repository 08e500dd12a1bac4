"""`memprof verify`: the original and the fixed model, both compared with float64.

An exact fix passes if its deviation from a float64 run is at most a small multiple of the original model's deviation,
plus some units in the last place of the quantity. A tighter bound is not possible: either of two roundings may be
nearer to the exact value.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from memprof.errors import UsageError
from memprof.fixes.applied import apply
from memprof.fixes.catalog import FIXES, Fix, Numerics, find_fixes
from memprof.fixes.micro_batch import MicroBatches
from memprof.flows.verify.optimizer_table import measure_optimizers
from memprof.flows.verify.peaks import make_adamw, measure_peak, simulate_peak, train
from memprof.flows.verify.precision_table import measure_precisions, measure_quantized_weights
from memprof.flows.verify.processes import compile_in_workers, import_dependencies, run_tasks, use_one_thread
from memprof.flows.verify.reference import compute_in_float64
from memprof.flows.verify.specimens import IGNORED_LABEL, SPECIMENS, Specimen, find_specimen, make_batches
from memprof.report.documents.verification import Deviation, FixPeak, Verification
from memprof.torch_private import dynamo
from memprof.workload.pool import count_workers
from memprof.workload.step import quiet_transformers

MAX_DEVIATION_RATIO = 4  # multiple of the original's deviation that the fixed model may have ...
MAX_FLOAT32_UNITS = 4  # ... plus this many float32 units of the largest number in the tensor
_EPS = torch.finfo(torch.float32).eps
_LEARNING_RATE, _MOMENTUM, _STEPS = 0.1, 0.9, 3
_VOCAB_CAP = 100  # vocabulary size under vocabulary-cap; the ids of all batches are below

# Options of verified fixes, and options for single models. Seven divides no number of tokens here.
_OPTIONS: dict[str, Any] = {
    "chunk_size": 7,
    "vocab_size": _VOCAB_CAP,
    "min_bytes": 0,
    "lora_rank": 4,
    "dataset": range(2),
    "frozen": "*embed*",
}
_MODEL_OPTIONS: dict[str, dict[str, Any]] = {
    "gpt2": {"frozen": "*wte*,*h.0.*"},
    "handwritten": {"lora_targets": "qkv,out"},
}


def _select_options(fix: Fix, model: str, general: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in {**general, **_MODEL_OPTIONS.get(model, {})}.items() if name in fix.options}


@contextlib.contextmanager
def _record_skip(found: Verification, fix: Fix, specimen: Specimen) -> Iterator[None]:
    """Context manager: record a UsageError of `fix` on the model in the verification's `skipped`."""
    try:
        yield
    except UsageError as error:
        found.skipped.setdefault((fix.name, specimen.name), error.line)


@quiet_transformers()
def verify(
    fixes: Sequence[str] = (),
    models: Sequence[str] = (),
    *,
    seeds: int = 2,
    progress: Callable[[str], None] = lambda _: None,
    trust_remote_code: bool = False,
) -> Verification:
    """Verify `fixes` (default: all) on `models` (default: the small models of `SPECIMENS`); return the results.
    Raises UsageError: an unknown fix or model."""
    chosen = [fix for name in fixes for fix in find_fixes([name])] or list(FIXES.values())
    found = Verification(seeds=seeds)
    specimens = [find_specimen(name, found.notes, trust_remote_code) for name in models] or list(SPECIMENS.values())
    is_parallel = not models and count_workers() > 1
    import_dependencies(chosen, [] if models else specimens)
    with use_one_thread(), compile_in_workers(chosen, is_parallel=is_parallel):
        # Worker processes report no progress.
        show_progress = (lambda _: None) if is_parallel else progress
        make_task = functools.partial(functools.partial, seeds=seeds, progress=show_progress)
        peaks = _PeakTasks(chosen, specimens[0] if models else None, show_progress)
        # The longest tasks come first: the models.
        tasks: list[Callable[[], Verification]] = [
            make_task(_verify_specimen, specimen, chosen, is_named=bool(models)) for specimen in specimens
        ]
        if any(fix.bench == "precision" for fix in chosen):
            tasks += [make_task(_verify_precisions, result) for result in specimens if models or not result.kind]
        large = specimens[0] if models else SPECIMENS["llama"]
        tasks += [make_task(_run_own_benchmark, fix, large) for fix in chosen if fix.bench not in ("", "precision")]
        originals = peaks.make_original_tasks()
        run = functools.partial(run_tasks, progress=progress, is_parallel=is_parallel)
        original_peaks = dict(zip(originals, run(list(originals.values())), strict=True))
        for result in run([*tasks, *peaks.make_fix_tasks(original_peaks, seeds)]):
            found.merge(result)
    return found


def _verify_specimen(
    specimen: Specimen, fixes: Sequence[Fix], *, is_named: bool, seeds: int, progress: Callable[[str], None]
) -> Verification:
    """Return the deviations of `fixes` on one model; only a model that the user named gets the fixes of other kinds."""
    verification = Verification(seeds=seeds)
    originals: dict[tuple[int, str], tuple[_TrainingResults, _TrainingResults]] = {}
    _reset_compiler()
    for fix in fixes:
        progress(f"{fix.name} on {specimen.name}")
        if fix.numerics is Numerics.APPROXIMATE or not (is_named or specimen.kind == fix.for_models):
            continue
        with _record_skip(verification, fix, specimen):
            verification.deviations += _find_deviations(fix, specimen, seeds, originals, verification.narrow)
    return verification


def _reset_compiler() -> None:
    """Reset Dynamo: after a few compilations of a function, Dynamo would run the function uncompiled."""
    if dynamo.reset.is_imported():
        dynamo.reset()


def _verify_precisions(specimen: Specimen, *, seeds: int, progress: Callable[[str], None]) -> Verification:
    progress(f"precision on {specimen.name}")
    return Verification(seeds=seeds, precisions=measure_precisions(specimen))


def _run_own_benchmark(fix: Fix, specimen: Specimen, *, seeds: int, progress: Callable[[str], None]) -> Verification:
    """Return the table of a fix with its own benchmark: quantized weights or 8-bit optimizers."""
    verification = Verification(seeds=seeds)
    with _record_skip(verification, fix, specimen):
        if fix.bench == "quantized weights":
            progress(f"{fix.name} on {specimen.name}")
            verification.precisions.append(measure_quantized_weights(specimen, fix.name))
        elif fix.bench == "optimizer":
            progress("steps of the 8-bit optimizer")
            verification.optimizers += measure_optimizers(specimen, fix.name)
    return verification


# -- deviations --------------------------------------------------------------------------------------------------------


@dataclass
class _TrainingResults:
    """Results of one model: loss, gradients, and parameters after some steps, by name."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]


def _build_model(specimen: Specimen, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return specimen.build().float().train()


def _make_sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    # Not Adam, which turns a gradient of pure rounding error into a full step.
    return torch.optim.SGD(parameters, lr=_LEARNING_RATE, momentum=_MOMENTUM)


def _find_deviations(
    fix: Fix,
    specimen: Specimen,
    seeds: int,
    originals: dict[tuple[int, str], tuple[_TrainingResults, _TrainingResults]],
    narrow: dict[str, tuple[str, ...]],
) -> list[Deviation]:
    """Return the rows with the largest deviation of one fix on one model: loss, gradients and parameters."""
    # With a cap, the original is another model: only the first rows of its head.
    vocab_cap = _VOCAB_CAP if "vocab_size" in fix.options else None
    worst: dict[str, Deviation] = {}
    for seed in range(seeds):
        for case in specimen.cases:
            if case == "accumulation" and not fix.accumulates:
                continue  # this fix does not support accumulation
            steps = make_batches(specimen, case, seed)
            model = _build_model(specimen, seed)
            key = (seed, case)
            if vocab_cap is not None or key not in originals:
                # Watched once per model: all runs execute the same code.
                narrow_ops: set[str] | None = None if specimen.name in narrow else set()
                reference = copy.deepcopy(model).double()
                with compute_in_float64(narrow_ops):
                    exact = _train(reference, steps, vocab_cap=vocab_cap)
                narrow.setdefault(specimen.name, tuple(sorted(narrow_ops or ())))
                pair = (exact, _train(copy.deepcopy(model), steps, vocab_cap=vocab_cap))
                if vocab_cap is None:
                    originals[key] = pair
            exact, original = pair if vocab_cap is not None else originals[key]
            options = _select_options(fix, specimen.name, {**_OPTIONS, "optimizer": _make_sgd})
            applied = apply(model, fix.name, **options)
            fixed = _train(model, steps, result=applied.results.get(fix.name))
            for row in _compare(fix.name, specimen.name, f"{case}, seed {seed}", exact, original, fixed):
                worst_row = worst.get(row.quantity)
                if worst_row is None or _error_ratio(row) > _error_ratio(worst_row):
                    worst[row.quantity] = row
    return list(worst.values())


def _error_ratio(row: Deviation) -> float:
    return math.inf if math.isnan(row.fixed) else row.fixed / row.bound


def _train(
    model: nn.Module, steps: list[dict[str, Any]], *, vocab_cap: int | None = None, result: Any = None
) -> _TrainingResults:
    """Train on the micro-batches `steps`; return loss and gradients of the first step, and the final parameters.

    `result` is the object that the fix returned: an optimizer, or MicroBatches.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = result if hasattr(result, "param_groups") else _make_sgd(list(trained.values()))
    first_loss: torch.Tensor | None = None
    gradients: dict[str, torch.Tensor] = {}
    for step in range(_STEPS):
        total = torch.zeros((), dtype=torch.float64)
        for batch in steps:
            if isinstance(result, MicroBatches):
                loss = result(**batch)
            else:
                loss = _compute_loss(model, batch, vocab_cap)
                loss.backward()
            total += loss.detach().double()
        if step == 0:
            first_loss = total
            gradients = {name: p.grad.detach().double().clone() for name, p in trained.items() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    assert first_loss is not None
    return _TrainingResults(first_loss, gradients, {name: p.detach().double().clone() for name, p in trained.items()})


def _compute_loss(model: nn.Module, batch: dict[str, Any], vocab_cap: int | None) -> torch.Tensor:
    if vocab_cap is None:
        loss: torch.Tensor = model(**batch)[0]
        return loss
    labels, num_items = batch["labels"][:, 1:], batch.get("num_items_in_batch")
    outputs = model(**{name: value for name, value in batch.items() if name not in ("labels", "num_items_in_batch")})
    logits = outputs[0][:, :-1, :vocab_cap]
    total = nn.functional.cross_entropy(
        logits.reshape(-1, vocab_cap),
        labels.reshape(-1),
        ignore_index=IGNORED_LABEL,
        reduction="mean" if num_items is None else "sum",
    )
    return total if num_items is None else total / num_items


def _compare(
    fix: str, model: str, case: str, exact: _TrainingResults, original: _TrainingResults, fixed: _TrainingResults
) -> list[Deviation]:
    make_row = functools.partial(Deviation, fix, model)
    rows = [make_row("loss", case, "", *_measure_deviation(exact.loss, original.loss, fixed.loss, 0.0))]
    for quantity, parts in (("gradients", "gradients"), (f"parameters after {_STEPS} steps", "parameters")):
        reference, before, after = (getattr(run, parts) for run in (exact, original, fixed))
        # Parameters that the fix freezes have no gradient, and parameters that the fix adds have no reference.
        names = [name for name in after if name in reference]
        # If the fix trains other parameters, later steps cannot be compared.
        if not names or (parts == "parameters" and fixed.gradients and set(fixed.gradients) != set(exact.gradients)):
            continue
        # A gradient that is zero except for rounding (of a key's bias, say) has the rounding of larger gradients.
        largest = max((float(reference[name].abs().max()) for name in names), default=0.0)
        floor = _EPS * (0.0 if math.isnan(largest) else largest)
        deviations = []
        for name in names:
            region = tuple(map(slice, after[name].shape))  # of a capped vocabulary
            values = reference[name][region], before[name][region], after[name]
            deviations.append(make_row(quantity, case, name, *_measure_deviation(*values, floor)))
        rows.append(max(deviations, key=_error_ratio))
    return rows


def _measure_deviation(
    exact: torch.Tensor, original: torch.Tensor, fixed: torch.Tensor, floor: float
) -> tuple[float, float, float]:
    """Return the largest absolute deviations of `original` and `fixed` from `exact`, and the bound of the latter.

    `fixed` must be NaN exactly where `exact` is (all labels ignored).
    """
    is_nan = exact.isnan()
    if not torch.equal(is_nan, fixed.isnan()):
        return 0.0, math.nan, floor
    exact, original, fixed = (part.masked_fill(is_nan, 0) for part in (exact, original, fixed))
    original_error = float((original - exact).abs().max())
    bound = MAX_DEVIATION_RATIO * original_error + MAX_FLOAT32_UNITS * _EPS * float(exact.abs().max()) + floor
    fixed_error = float((fixed - exact).abs().max())
    return original_error, fixed_error, max(bound, 1e-300)


# -- peaks -------------------------------------------------------------------------------------------------------------


_PEAK_OPTIONS = {
    **{name: value for name, value in _OPTIONS.items() if name != "min_bytes"},
    "chunk_size": 128,
    "vocab_size": 4000,
    "optimizer": make_adamw,
}


@dataclass(frozen=True)
class _PeakTasks:
    """Peaks of a training step without fixes and with each of `chosen`, on the model `named` or on small ones."""

    chosen: Sequence[Fix]
    named: Specimen | None
    progress: Callable[[str], None]

    def _iter_keys(self) -> Iterator[tuple[Fix, _PeakKey]]:
        for fix in self.chosen:
            if set(fix.saves) - {"host memory"}:  # saves GPU memory
                specimen = self.named or SPECIMENS[fix.for_models or "llama"]
                rows = 2 if "micro_batch_size" in fix.options else 1
                yield fix, _PeakKey(specimen, rows, fix.saves == ("fragmentation",))

    def make_original_tasks(self) -> dict[_PeakKey, Callable[[], _PeakBytes]]:
        """Return, for each model, a function that measures its peak without fixes."""
        return {key: functools.partial(self._measure_peak, key, None) for _, key in self._iter_keys()}

    def make_fix_tasks(self, originals: Mapping[_PeakKey, _PeakBytes], seeds: int) -> list[Callable[[], Verification]]:
        """Return, for each fix, a function that measures the peak with the fix."""
        row = functools.partial(functools.partial, self._measure_row, seeds=seeds)
        return [row(fix, key, originals[key]) for fix, key in self._iter_keys()]

    def _measure_row(self, fix: Fix, key: _PeakKey, before: _PeakBytes, *, seeds: int) -> Verification:
        verification = Verification(seeds=seeds)
        batch = f"{key.rows} rows of " if key.rows > 1 else ""
        workload = f"{key.specimen.name}, {batch}{key.specimen.peak_tokens:,} tokens, float32, AdamW"
        workload += ", reserved" if key.reserved else ""
        with _record_skip(verification, fix, key.specimen):
            after = self._measure_peak(key, fix)
            verification.peaks.append(
                FixPeak(
                    fix.name, workload, before.simulated, after.simulated, _device_type(), before.measured,
                    after.measured, after.reason,
                )
            )  # fmt: skip
        return verification

    def _measure_peak(self, key: _PeakKey, fix: Fix | None) -> _PeakBytes:
        device = _device_type()
        options = {} if fix is None else _select_options(fix, key.specimen.name, _PEAK_OPTIONS)
        program = functools.partial(train, key.specimen, fix, options, key.rows)
        name = "of the original" if fix is None else f"with {fix.name}"
        _reset_compiler()
        self.progress(f"simulating the peak {name}")
        simulated = simulate_peak(program, workspaces=device == "cuda", reserved=key.reserved)
        if key.reserved and device == "cpu":
            return _PeakBytes(simulated, None, "a CPU's allocator reserves nothing")
        self.progress(f"measuring the peak {name}")
        try:
            return _PeakBytes(simulated, measure_peak(program, device, reserved=key.reserved))
        except (UsageError, RuntimeError, NotImplementedError) as error:
            # Some fixes run only on a GPU: the table shows the reason.
            return _PeakBytes(simulated, None, str(error).splitlines()[0])


def _device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


class _PeakKey(NamedTuple):
    specimen: Specimen
    rows: int  # of the batch
    reserved: bool  # bytes that are reserved, not allocated


class _PeakBytes(NamedTuple):
    simulated: int
    measured: int | None
    reason: str = ""  # why the peak was not measured
