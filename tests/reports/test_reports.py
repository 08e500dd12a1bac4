"""The cause of public bug reports is the first finding, with the line to change and what helped; some in `make test`.

What is not so yet stands in `KNOWN`, with what is said instead. A report that is told rightly from now on fails until
its line there is removed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lanes import by_day
from tests.reports.reports import Report, list_mistakes, list_reports, read, run

REPORTS = list_reports()

KNOWN = {
    "diffusers_10350": "the graph that the calls keep is told six times more, as idle memory",
    "ema_pytorch_35": "suggests another optimizer, not copies on the CPU; fragmentation that changes nothing",
    "functorch_1058": "suggests micro-batches, not chunk_size",
    "functorch_774": "does not suggest chunk_size",
    "lightning_15514": "growth within epochs, at whose ends a list is cleared, is not told",
    "lightning_7335": "segments without a tensor, left by growing batches, are told as fragmentation",
    "mellea_544": "KV caches that outputs keep have no holder; the list is the third finding, for the scores alone",
    "mmdetection_8232": "suggests fixes for training, where tensors can be made in parts",
    "monai_6427": "suggests micro-batches, where the one tensor can be in host memory",
    "nanogpt_236": "a checkpoint is not told as idle where memory runs out in a forward",
    "nemo_rl_1147": "gradients are the third finding, without the line of zero_grad()",
    "opacus_176": "tensors that a hook keeps of inner modules, without gradients, do not count as growth",
    "parlai_2487": "a first model is not told as idle where memory runs out while the second is made",
    "pinot_23": "the same tensors are told again, as unattributed",
    "pml_203": "suggests micro-batches, where there are too many pairs",
    "pointcontrast_11": "suggests fixes for vocabularies, where there are points",
    "pyg_459": "suggests fixes for training, where a sparse product makes no messages",
    "pytorch_118883": "sampled_addmm is not simulated",
    "pytorch_134612": "does not suggest torch.autograd.grad",
    "pytorch_1893": "suggests fixes for vocabularies, where DataParallel gathers outputs",
    "pytorch_2198": "growth over the micro-batches of one step is not told",
    "pytorch_25340": "tensors in a reference cycle are not told until they are collected",
    "pytorch_41128": "suggests micro-batches, where the sparse matrix needs no gradient",
    "pytorch_46386": "to delete the model is told, which the program does: a reference cycle keeps it",
    "pytorch_47589": "steps of new optimizers, while the old ones live, count as one, so that nothing grows",
    "pytorch_48049": "the model is told as unused, where autocast keeps copies of its weights",
    "pytorch_51978": "growth of a program without optimizer is not told",
    "pytracking_313": "an attribute of an object in a dict, with the graphs of all steps, is not seen as a holder",
    "ray_7238": "the graph is told as idle memory; calls without backward in training mode are not looked at",
    "tangermeme_84": "names a line of torch, not the attribute of the modules",
    "torchmetrics_1160": "the graph that the metric keeps is told three times more, as idle memory",
    "torchmetrics_1738": "suggests to keep less, not to reset the metric",
    "torchmetrics_3294": "suggests to keep less, not to reset the metric",
    "torchtune_1917": "does not suggest an earlier backward",
    "transformers_26571": "a first model is not told as idle where memory runs out while the second is made",
    "transformers_47731": "a tensor that was given to a model counts as an input, which is never idle",
    "transformers_48131": "suggests micro-batches, not a loss layer by layer",
    "transformers_7232": "what the evaluation keeps is the fourth finding",
    "trl_2799": "suggests a chunked loss, not a gather before the logsumexp",
}


BY_DAY = ("fms_fsdp_152", "functorch_1058", "nanogpt_236", "pinot_23", "pytorch_4661", "pyg_459", "unsloth_7678")


@pytest.mark.parametrize("name", by_day(REPORTS, *BY_DAY))
def test_cause(name, tmp_path, request):
    if name in KNOWN:
        request.applymarker(pytest.mark.xfail(reason=KNOWN[name], raises=AssertionError, strict=True))
    findings = run(REPORTS[name], tmp_path)["findings"]
    assert not list_mistakes(REPORTS[name], findings)


def test_what_is_known_is_there():
    assert KNOWN.keys() <= REPORTS.keys()


LEAK = Report(
    path=Path("leak.py"),
    source="owner/name#1",
    options=(),
    first=("memory-growth",),
    fixes=(".cpu()",),
    useless_fixes=("vocabulary-cap",),
    others=("fragmentation",),
    causes=("leak.py:7",),
)


def finding(name, title="", fixes=(), **evidence):
    return {"id": name, "title": title, "evidence": [{"source": None, **evidence}] if evidence else [], "fixes": fixes}


GROWTH = finding(
    "memory-growth", "kept by list `outputs` (leak.py:7)", text="fix: .detach().cpu()", source="leak.py:7 f"
)


def test_what_is_right_is_no_mistake():
    assert not list_mistakes(LEAK, [GROWTH, finding("fragmentation"), finding("does-not-fit")])


@pytest.mark.parametrize(
    ("findings", "mistake"),
    [
        ([], "no findings"),
        ([finding("idle-memory", "leak.py:7, .cpu()")], "idle-memory is first, not memory-growth"),
        ([finding("memory-growth", "leak.py:70, .cpu()")], "the first finding does not name leak.py:7"),
        ([finding("memory-growth", "leak.py:7")], "the first finding does not say .cpu()"),
        ([finding("does-not-fit"), GROWTH], "the cause is finding 2, after does-not-fit"),
        ([GROWTH, finding("idle-memory")], "idle-memory is false"),
        ([GROWTH, finding("does-not-fit", fixes=["vocabulary-cap"])], "vocabulary-cap cannot help"),
    ],
)
def test_a_mistake_is_seen(findings, mistake):
    assert list_mistakes(LEAK, findings) == [mistake]


@pytest.mark.parametrize(
    "text",
    [
        "# a program\n# resolved: so\n# run: -q\n# first: a\n# fix: b\nx = 1  # <- cause\n",
        "# owner/name#1: what\n# run: -q\n# first: a\n# fix: b\nx = 1  # <- cause\n",
        "# owner/name#1: what\n# resolved: so\n# run: -q\n# first: a\n# fix: b\n# why: c\nx = 1  # <- cause\n",
        "# owner/name#1: what\n# resolved: so\n# run: -q\n# first: a\n# fix: b\nx = 1\n",
    ],
    ids=["no report", "no resolution", "an unknown key", "no cause"],
)
def test_a_header_that_is_not_understood(text, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"program\.py"):
        read(path)
