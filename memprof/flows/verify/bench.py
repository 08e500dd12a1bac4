"""`verify`: the original and the fixed model side by side, both against float64.

A fix that promises the same numbers keeps its promise if its deviation from a float64 run is no larger than a small
multiple of the original's own, plus some units in the last place of the quantity itself. Which of two roundings comes
nearer to the truth is chance, so that one cannot ask for less.
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
from memprof.flows.verify.optimizer_table import optimizer_rows
from memprof.flows.verify.peaks import adamw, measured_peak, simulated_peak, train
from memprof.flows.verify.precision_table import precision_rows, quantized_row
from memprof.flows.verify.processes import all_of, compiled_here, one_thread, prepare
from memprof.flows.verify.reference import float64_throughout
from memprof.flows.verify.specimens import IGNORED, SPECIMENS, Specimen, batches, find_specimen
from memprof.report.documents.verification import Deviation, FixPeak, Verification
from memprof.torch_private import dynamo
from memprof.workload.pool import number_of_workers
from memprof.workload.step import quiet_transformers

OWN_ERRORS = 4  # how many times the original's own deviation the fixed model may have, ...
UNITS = 4  # ... beside this many float32 units of the largest number in the tensor
_EPS = torch.finfo(torch.float32).eps
_LEARNING_RATE, _MOMENTUM, _STEPS = 0.1, 0.9, 3
_CAP = 100  # tokens that vocabulary-cap leaves; no id of a batch is above

# The options that fixes are verified with, and other ones of a model. Seven divides no number of tokens here.
_TRIED: dict[str, Any] = {
    "chunk_size": 7,
    "vocab_size": _CAP,
    "min_bytes": 0,
    "lora_rank": 4,
    "dataset": range(2),
    "frozen": "*embed*",
}
_TRIED_ON: dict[str, dict[str, Any]] = {
    "gpt2": {"frozen": "*wte*,*h.0.*"},
    "handwritten": {"lora_targets": "qkv,out"},
}


def _options(fix: Fix, model: str, general: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in {**general, **_TRIED_ON.get(model, {})}.items() if name in fix.options}


@contextlib.contextmanager
def _skipping(found: Verification, fix: Fix, specimen: Specimen) -> Iterator[None]:
    """Note why `fix` does not apply to the model, if it does not."""
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
    progress: Callable[[str], None] = lambda doing: None,
    trust_remote_code: bool = False,
) -> Verification:
    """Verify `fixes` (all, if none is named) on `models` (the small ones, if none is named).
    Raises UsageError: an unknown fix or model, or fewer than one seed."""
    chosen = [fix for name in fixes for fix in find_fixes([name])] or list(FIXES.values())
    if seeds < 1:
        raise UsageError("--seeds must be at least 1", value=str(seeds), hint="give a positive whole number")
    found = Verification(seeds=seeds)
    specimens = [find_specimen(name, found.notes, trust_remote_code) for name in models] or list(SPECIMENS.values())
    several = not models and number_of_workers() > 1
    prepare(chosen, [] if models else specimens)
    with one_thread(), compiled_here(chosen, several=several):
        # A process of its own tells nobody what it does.
        tell = (lambda doing: None) if several else progress
        part = functools.partial(functools.partial, seeds=seeds, progress=tell)
        peaks = _Peaks(chosen, specimens[0] if models else None, tell)
        # What takes longest comes first: the models.
        works: list[Callable[[], Verification]] = [
            part(_deviations_of, specimen, chosen, named=bool(models)) for specimen in specimens
        ]
        if any(fix.bench == "precision" for fix in chosen):
            works += [part(_precisions_of, one) for one in specimens if models or not one.kind]
        large = specimens[0] if models else SPECIMENS["llama"]
        works += [part(_make_own_table, fix, large) for fix in chosen if fix.bench not in ("", "precision")]
        originals = peaks.originals()
        at_once = functools.partial(all_of, progress=progress, several=several)
        known = dict(zip(originals, at_once(list(originals.values())), strict=True))
        for one in at_once([*works, *peaks.with_fixes(known, seeds)]):
            found.take(one)
    return found


def _deviations_of(
    specimen: Specimen, chosen: Sequence[Fix], *, named: bool, seeds: int, progress: Callable[[str], None]
) -> Verification:
    """Find what fixes do to the numbers of one model; `named` by the user, it is tried with all of them."""
    found = Verification(seeds=seeds)
    originals: dict[tuple[int, str], tuple[_Run, _Run]] = {}
    _reset_compiler()
    for fix in chosen:
        progress(f"{fix.name} on {specimen.name}")
        if fix.numerics is Numerics.APPROXIMATE or not (named or specimen.kind == fix.for_models):
            continue
        with _skipping(found, fix, specimen):
            found.deviations += _deviations(fix, specimen, seeds, originals, found.narrow)
    return found


def _reset_compiler() -> None:
    """Have Dynamo compile again: it compiles a function a few times, and then runs it as it is."""
    if dynamo.reset.is_imported():
        dynamo.reset()


def _precisions_of(specimen: Specimen, *, seeds: int, progress: Callable[[str], None]) -> Verification:
    progress(f"precision on {specimen.name}")
    return Verification(seeds=seeds, precisions=precision_rows(specimen))


def _make_own_table(fix: Fix, large: Specimen, *, seeds: int, progress: Callable[[str], None]) -> Verification:
    """Make the table of a fix that has one of its own."""
    found = Verification(seeds=seeds)
    with _skipping(found, fix, large):
        if fix.bench == "quantized weights":
            progress(f"{fix.name} on {large.name}")
            found.precisions.append(quantized_row(large, fix.name))
        elif fix.bench == "optimizer":
            progress("steps of the 8-bit optimizer")
            found.optimizers += optimizer_rows(large, fix.name)
    return found


# -- deviations --------------------------------------------------------------------------------------------------------


@dataclass
class _Run:
    """The numbers that one model gave: loss, gradients, and parameters after some steps, by name."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]


def _build(specimen: Specimen, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return specimen.build().float().train()


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    # Not Adam: where a gradient is nothing but rounding, it makes a whole step of it.
    return torch.optim.SGD(parameters, lr=_LEARNING_RATE, momentum=_MOMENTUM)


def _deviations(
    fix: Fix,
    specimen: Specimen,
    seeds: int,
    originals: dict[tuple[int, str], tuple[_Run, _Run]],
    narrow: dict[str, tuple[str, ...]],
) -> list[Deviation]:
    """Return the worst rows of one fix on one model: loss, gradients and parameters."""
    # Capped, the original is another model: its head's first rows.
    cap = _CAP if "vocab_size" in fix.options else None
    worst: dict[str, Deviation] = {}
    for seed in range(seeds):
        for case in specimen.cases:
            if case == "accumulation" and not fix.accumulates:
                continue  # it is what this fix gives up
            steps = batches(specimen, case, seed)
            model = _build(specimen, seed)
            key = (seed, case)
            if cap is not None or key not in originals:
                # Watched once for each model: it is the same code every time.
                below: set[str] | None = None if specimen.name in narrow else set()
                reference = copy.deepcopy(model).double()
                with float64_throughout(below):
                    exact = _run(reference, steps, cap=cap)
                narrow.setdefault(specimen.name, tuple(sorted(below or ())))
                pair = (exact, _run(copy.deepcopy(model), steps, cap=cap))
                if cap is None:
                    originals[key] = pair
            exact, original = pair if cap is not None else originals[key]
            options = _options(fix, specimen.name, {**_TRIED, "optimizer": _sgd})
            applied = apply(model, fix.name, **options)
            fixed = _run(model, steps, result=applied.results.get(fix.name))
            for row in _compare(fix.name, specimen.name, f"{case}, seed {seed}", exact, original, fixed):
                before = worst.get(row.quantity)
                if before is None or _badness(row) > _badness(before):
                    worst[row.quantity] = row
    return list(worst.values())


def _badness(row: Deviation) -> float:
    return math.inf if math.isnan(row.fixed) else row.fixed / row.bound


def _run(model: nn.Module, steps: list[dict[str, Any]], *, cap: int | None = None, result: Any = None) -> _Run:
    """Run some steps on the same micro-batches; loss and gradients are the first step's.

    `result` is what the fix made: an optimizer, or what does forward and backward.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = result if hasattr(result, "param_groups") else _sgd(list(trained.values()))
    first: torch.Tensor | None = None
    gradients: dict[str, torch.Tensor] = {}
    for step in range(_STEPS):
        total = torch.zeros((), dtype=torch.float64)
        for batch in steps:
            if isinstance(result, MicroBatches):
                loss = result(**batch)
            else:
                loss = _loss(model, batch, cap)
                loss.backward()
            total += loss.detach().double()
        if step == 0:
            first = total
            gradients = {name: p.grad.detach().double().clone() for name, p in trained.items() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    assert first is not None
    return _Run(first, gradients, {name: p.detach().double().clone() for name, p in trained.items()})


def _loss(model: nn.Module, batch: dict[str, Any], cap: int | None) -> torch.Tensor:
    if cap is None:
        loss: torch.Tensor = model(**batch)[0]
        return loss
    labels, items = batch["labels"][:, 1:], batch.get("num_items_in_batch")
    outputs = model(**{name: value for name, value in batch.items() if name not in ("labels", "num_items_in_batch")})
    logits = outputs[0][:, :-1, :cap]
    total = nn.functional.cross_entropy(
        logits.reshape(-1, cap), labels.reshape(-1), ignore_index=IGNORED, reduction="mean" if items is None else "sum"
    )
    return total if items is None else total / items


def _compare(fix: str, model: str, case: str, exact: _Run, original: _Run, fixed: _Run) -> list[Deviation]:
    row = functools.partial(Deviation, fix, model)
    rows = [row("loss", case, "", *_deviation(exact.loss, original.loss, fixed.loss, 0.0))]
    for quantity, parts in (("gradients", "gradients"), (f"parameters after {_STEPS} steps", "parameters")):
        truth, theirs, ours = (getattr(run, parts) for run in (exact, original, fixed))
        # What a fix does not train it has no gradient for, and what it adds the original has not.
        names = [name for name in ours if name in truth]
        # With other parameters trained, later steps lead elsewhere.
        if not names or (parts == "parameters" and fixed.gradients and set(fixed.gradients) != set(exact.gradients)):
            continue
        # A gradient that is zero but for rounding (of a key's bias, say) has the others' rounding.
        largest = max((float(truth[name].abs().max()) for name in names), default=0.0)
        floor = _EPS * (0.0 if math.isnan(largest) else largest)
        deviations = []
        for name in names:
            cut = tuple(map(slice, ours[name].shape))  # of a capped vocabulary
            values = truth[name][cut], theirs[name][cut], ours[name]
            deviations.append(row(quantity, case, name, *_deviation(*values, floor)))
        rows.append(max(deviations, key=_badness))
    return rows


def _deviation(
    exact: torch.Tensor, original: torch.Tensor, fixed: torch.Tensor, floor: float
) -> tuple[float, float, float]:
    """Return what `original` and `fixed` deviate, and what the latter may.

    Where float64 has no number (all labels ignored), neither may have one.
    """
    nowhere = exact.isnan()
    if not torch.equal(nowhere, fixed.isnan()):
        return 0.0, math.nan, floor
    exact, original, fixed = (part.masked_fill(nowhere, 0) for part in (exact, original, fixed))
    own = float((original - exact).abs().max())
    bound = OWN_ERRORS * own + UNITS * _EPS * float(exact.abs().max()) + floor
    found = float((fixed - exact).abs().max())
    return own, found, max(bound, 1e-300)


# -- peaks -------------------------------------------------------------------------------------------------------------


_PEAK_OPTIONS = {
    **{name: value for name, value in _TRIED.items() if name != "min_bytes"},
    "chunk_size": 128,
    "vocab_size": 4000,
    "optimizer": adamw,
}


@dataclass(frozen=True)
class _Peaks:
    """Peaks of a training step, as a model is and with each of `chosen`: of that which is `named`, or of small ones."""

    chosen: Sequence[Fix]
    named: Specimen | None
    progress: Callable[[str], None]

    def _keys(self) -> Iterator[tuple[Fix, _Key]]:
        for fix in self.chosen:
            if set(fix.saves) - {"host memory"}:  # something on the GPU
                specimen = self.named or SPECIMENS[fix.for_models or "llama"]
                rows = 2 if "micro_batch_size" in fix.options else 1
                yield fix, _Key(specimen, rows, fix.saves == ("fragmentation",))

    def originals(self) -> dict[_Key, Callable[[], _Bytes]]:
        """Return tasks that find the peak of each model as it is."""
        return {key: functools.partial(self._peak, key, None) for _, key in self._keys()}

    def with_fixes(self, originals: Mapping[_Key, _Bytes], seeds: int) -> list[Callable[[], Verification]]:
        """Return what finds the row of each fix."""
        row = functools.partial(functools.partial, self._row, seeds=seeds)
        return [row(fix, key, originals[key]) for fix, key in self._keys()]

    def _row(self, fix: Fix, key: _Key, before: _Bytes, *, seeds: int) -> Verification:
        found = Verification(seeds=seeds)
        batch = f"{key.rows} rows of " if key.rows > 1 else ""
        workload = f"{key.specimen.name}, {batch}{key.specimen.peak_tokens:,} tokens, float32, AdamW"
        workload += ", reserved" if key.reserved else ""
        with _skipping(found, fix, key.specimen):
            after = self._peak(key, fix)
            found.peaks.append(
                FixPeak(
                    fix.name, workload, before.simulated, after.simulated, _device(), before.measured,
                    after.measured, after.reason,
                )
            )  # fmt: skip
        return found

    def _peak(self, key: _Key, fix: Fix | None) -> _Bytes:
        device = _device()
        options = {} if fix is None else _options(fix, key.specimen.name, _PEAK_OPTIONS)
        program = functools.partial(train, key.specimen, fix, options, key.rows)
        name = "of the original" if fix is None else f"with {fix.name}"
        _reset_compiler()
        self.progress(f"simulating the peak {name}")
        simulated = simulated_peak(program, workspaces=device == "cuda", reserved=key.reserved)
        if key.reserved and device == "cpu":
            return _Bytes(simulated, None, "a CPU's allocator reserves nothing")
        self.progress(f"measuring the peak {name}")
        try:
            return _Bytes(simulated, measured_peak(program, device, reserved=key.reserved))
        except (UsageError, RuntimeError, NotImplementedError) as error:
            # What runs on a GPU alone: the reason stands in the table's place.
            return _Bytes(simulated, None, str(error).splitlines()[0])


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


class _Key(NamedTuple):
    specimen: Specimen
    rows: int  # of its batch
    reserved: bool  # bytes that are reserved, not allocated


class _Bytes(NamedTuple):
    simulated: int
    measured: int | None
    reason: str = ""  # why it was not measured
