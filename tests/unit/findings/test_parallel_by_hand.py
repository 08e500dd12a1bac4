"""Rules on distributed runs, in hand-written traces: what each would save, its line, and where it is silent."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from memprof.findings import (
    Context,
    Finding,
    Severity,
    duplicate_gradients,
    float32_reduction,
    kept_unsharded,
    prefetch,
    ranks_differ,
    state_not_sharded,
    unreduced_gradients,
    unsharded_group,
)
from memprof.findings.groups import comm_buffers, full_bytes, gathers, group_line, name_filter, strip_wrappers
from memprof.ledger.categories import Category
from memprof.ledger.ledger import LiveTensor
from memprof.trace.events import ModuleRole, PhaseKind, Role
from memprof.trace.facts import ShardedGroup
from memprof.units import MIB
from tests.unit.allocator.traces import StreamScript
from tests.unit.findings.figures import all_figures, figures
from tests.unit.traces import TraceBuilder

DDP, FSDP1, FSDP2 = "DistributedDataParallel", "FullyShardedDataParallel", "fully_shard"
MILLION = MIB // 4  # elements of float32 in a MiB
BUILD = "train.py:3 build"


def wrapped(b: TraceBuilder, *groups: ShardedGroup) -> Context:
    b.trace.facts = dataclasses.replace(b.trace.facts, groups=groups)
    return b.context()


def parameter(b: TraceBuilder, name: str, mib: int) -> None:
    b.new(mib * MILLION, op="aten.empty", line=BUILD, owner=(Role.PARAMETER, name))


def only(findings: list[Finding], name: str) -> Finding:
    (finding,) = findings
    assert finding.id == name
    return finding


# -- DistributedDataParallel -----------------------------------------------------------------------------------------


def with_buckets(*, views: bool = False, ranks: int = 2, buckets: bool = True, api: str = DDP) -> Context:
    """Gradients of 100 and 60 MiB beside a bucket of 160, and one of 8 MiB of a parameter that DDP does not have."""
    b = TraceBuilder()
    parameter(b, "module.a", 100)
    parameter(b, "module.b", 60)
    if buckets:
        b.new(160 * MILLION, op="aten.empty", line="train.py:5 wrap", owner=(Role.COMMUNICATION, "gradient bucket"))
    b.phase(PhaseKind.BACKWARD)
    for name, mib in (("module.a", 100), ("module.b", 60), ("other", 8)):
        b.new(mib * MILLION, line="train.py:9 main", owner=(Role.GRADIENT, name))
    return wrapped(b, ShardedGroup(api, "", ranks, ("a", "b"), ((100 * MILLION,), (60 * MILLION,)), "float32", views))


def test_gradients_beside_their_bucket() -> None:
    finding = only(duplicate_gradients.find(with_buckets()), "gradients-twice")
    assert (finding.severity, finding.num_bytes) == (Severity.WARNING, 160 * MIB)  # of 488 MiB
    assert all_figures(finding) == [
        ["160.00 MiB", "160.00 MiB", "160.00 MiB", "33%"],
        ["train.py:5"],
        ["[41943040]", "float32", "160.00 MiB", "aten.empty", "train.py:5", "1"],
        ["[26214400]", "float32", "100.00 MiB", "aten.mm", "train.py:9", "1"],
        ["[15728640]", "float32", "60.00 MiB", "aten.mm", "train.py:9", "1"],
    ]
    assert finding.evidence[0].source == "train.py:5 wrap"


@pytest.mark.parametrize("other", [{"views": True}, {"ranks": 1}, {"buckets": False}, {"api": FSDP1}])
def test_gradients_are_there_once(other: dict[str, Any]) -> None:
    assert not duplicate_gradients.find(with_buckets(**other))


def test_the_largest_shard_of_optimizer_state_is_of_the_largest_parameters_first() -> None:
    """40 + 60 and 100 MiB; in the order of the model, it would be 40 + 100."""
    b = TraceBuilder()
    sizes = {"a": 40, "b": 60, "c": 100}
    for name, mib in sizes.items():
        parameter(b, name, mib)
    b.phase(PhaseKind.OPTIMIZER_STEP)
    for mib in sizes.values():
        b.new(mib * MILLION, op="aten.zeros_like", line=f"train.py:{mib} main", owner=(Role.OPTIMIZER_STATE, "exp_avg"))
    b.new(60 * MILLION, device="cpu", owner=(Role.OPTIMIZER_STATE, "exp_avg"))
    shapes = tuple((mib * MILLION,) for mib in sizes.values())
    finding = only(
        state_not_sharded.find(wrapped(b, ShardedGroup(DDP, "", 2, tuple(sizes), shapes, "float32"))),
        "optimizer-state-not-sharded",
    )
    assert (finding.severity, finding.num_bytes) == (Severity.NOTE, 100 * MIB)
    assert all_figures(finding) == [
        ["2", "200.00 MiB", "1", "100.00 MiB", "100.00 MiB", "25%"],
        ["train.py:100"],  # of the largest
        ["[26214400]", "float32", "100.00 MiB", "aten.zeros_like", "train.py:100", "1"],
        ["[15728640]", "float32", "60.00 MiB", "aten.zeros_like", "train.py:60", "1"],
        ["[10485760]", "float32", "40.00 MiB", "aten.zeros_like", "train.py:40", "1"],
    ]


@pytest.mark.parametrize(("state_mib", "is_told"), [(180, True), (178, False)])
def test_state_is_whole_from_nine_tenths_of_the_parameters_on(state_mib: int, is_told: bool) -> None:
    b = TraceBuilder()
    parameter(b, "a", 100)
    parameter(b, "b", 100)
    b.phase(PhaseKind.OPTIMIZER_STEP)
    b.new(state_mib * MILLION, owner=(Role.OPTIMIZER_STATE, "exp_avg"))
    group = ShardedGroup(DDP, "", 2, ("a", "b"), ((100 * MILLION,),) * 2, "float32")
    assert bool(state_not_sharded.find(wrapped(b, group))) == is_told


# -- FSDP ------------------------------------------------------------------------------------------------------------

LAYERS = tuple(f"layers.{number}.weight" for number in range(4))


def one_group(api: str = FSDP2, layer_mib: int = 50, *, layers: int = 4, flat: bool = False) -> Context:
    """Layers and an embedding of 20 MiB in one group, gathered in one buffer, and once more one by one, or flat."""
    b = TraceBuilder()
    names = (*LAYERS[:layers], "embed.weight")
    mibs = (*[layer_mib] * layers, 20)
    for name, mib in zip(names, mibs, strict=True):
        parameter(b, name, mib // 2)
        b.enter(name.removesuffix(".weight"), "Block" if "layers" in name else "Embedding", ModuleRole.LAYER)
        b.leave()
    b.phase(PhaseKind.FORWARD)
    b.new(sum(mibs) * MILLION, owner=(Role.COMMUNICATION, "all-gather"))
    b.new(10 * MILLION, owner=(Role.COMMUNICATION, "all-gather"))  # of something else
    for name, mib in [("_flat_param", sum(mibs))] if flat else zip(names, mibs, strict=True):
        b.new(mib * MILLION, owner=(Role.UNSHARDED, name))
    return wrapped(b, ShardedGroup(api, "", 2, names, tuple((mib * MILLION,) for mib in mibs), "float32"))


@pytest.mark.parametrize(
    ("api", "fix"),
    [(FSDP2, "for layer in model.layers: fully_shard(layer), before it"), (FSDP1, "ModuleWrapPolicy({Block})")],
)
@pytest.mark.parametrize("flat", [False, True])
def test_layers_in_one_group(api: str, fix: str, flat: bool) -> None:
    """Two layers of four would be whole at once: 100 of 220 MiB less in the buffer, and as much beside it."""
    finding = only(unsharded_group.find(one_group(api, flat=flat)), "unsharded-group")
    assert (finding.severity, finding.num_bytes) == (Severity.WARNING, 200 * MIB)  # of 564: 25 MiB of a shard take 26
    assert all_figures(finding) == [
        ["220.00 MiB", "4", "200.00 MiB", "35%"],
        ["train.py:3"],
        ["220.00 MiB", "50.00 MiB"],
    ]
    assert fix in finding.evidence[0].text and "model.layers" in finding.title


@pytest.mark.parametrize(("layers", "layer_mib", "saved_mib"), [(3, 100, 200), (3, 30, None), (2, 100, None)])
def test_two_layers_may_be_whole_at_once(layers: int, layer_mib: int, saved_mib: int | None) -> None:
    """One of three is saved twice: 200 MiB, or 60, which is too little."""
    found = unsharded_group.find(one_group(layers=layers, layer_mib=layer_mib))
    assert [one.num_bytes for one in found] == ([] if saved_mib is None else [saved_mib * MIB])


def gathered(
    num_groups: int = 4, mib: int = 100, *, times: int = 1, api: str = FSDP2, ranks: int = 2, **settings: object
) -> Context:
    """Groups of `mib`, all of which are gathered, `times` over, into tensors and buffers of 2 MiB more for each."""
    b = TraceBuilder()
    groups = []
    for number in range(num_groups):
        name = f"layers.{number}.weight"
        parameter(b, name, mib // 2)
        groups.append(ShardedGroup(api, f"layers.{number}", ranks, (name,), ((mib * MILLION,),), "float32", **settings))
    b.phase(PhaseKind.FORWARD)
    for number in [*range(num_groups)] * times:
        own = (Role.COMMUNICATION, "all-gather") if "ahead" in settings else (Role.UNSHARDED, LAYERS[number])
        b.new((mib + 2 * number) * MILLION, line="train.py:8 main", owner=own)
    return wrapped(b, *groups)


@pytest.mark.parametrize(
    ("api", "setting", "fix"),
    [
        (FSDP2, "reshard_after_forward=False", "reshard_after_forward=True"),
        (FSDP1, "SHARD_GRAD_OP", "ShardingStrategy.FULL_SHARD"),
    ],
)
def test_what_is_kept_unsharded(api: str, setting: str, fix: str) -> None:
    """The newest two of 100, 102, 104 and 106 MiB may stay."""
    finding = only(kept_unsharded.find(gathered(api=api, kept=True)), "kept-unsharded")
    assert (finding.severity, finding.num_bytes) == (Severity.NOTE, 202 * MIB)  # of 612
    assert all_figures(finding) == [["4", "202.00 MiB", "33%"], ["train.py:3"], ["400.00 MiB"]]
    assert setting in finding.title and finding.evidence[0].text.endswith(fix)
    assert finding.evidence[1].num_bytes == 400 * MIB


@pytest.mark.parametrize(
    ("other", "is_told"),
    [
        ({"kept": False}, False),
        ({"kept": True, "ranks": 1}, False),
        ({"kept": True, "num_groups": 3}, True),
        ({"kept": True, "num_groups": 2, "times": 2}, False),  # the same two again
        ({"kept": True, "num_groups": 3, "mib": 62}, False),
    ],
)
def test_two_groups_may_be_kept_unsharded(other: dict[str, int], is_told: bool) -> None:
    assert bool(kept_unsharded.find(gathered(**other))) == is_told


def test_what_is_gathered_further_ahead_than_one_group() -> None:
    """All but the oldest two of 100, 102, 104 and 106 MiB."""
    finding = only(prefetch.find(gathered(ahead=3)), "prefetch-too-deep")
    assert (finding.severity, finding.num_bytes) == (Severity.WARNING, 210 * MIB)  # of 612
    assert all_figures(finding) == [
        ["3", "210.00 MiB", "34%"],
        ["train.py:3"],
        ["[27787264]", "float32", "106.00 MiB", "aten.mm", "train.py:8", "1"],
        ["[27262976]", "float32", "104.00 MiB", "aten.mm", "train.py:8", "1"],
        ["[26738688]", "float32", "102.00 MiB", "aten.mm", "train.py:8", "1"],
    ]
    assert prefetch.find(gathered(ahead=2)) and not prefetch.find(gathered(ahead=1))
    assert not prefetch.find(gathered(ahead=3, mib=26))


def gathered_on_a_stream(api: str = FSDP1, mib: int = 100, **settings: bool) -> Context:
    """Three groups are gathered on a stream, and freed while another one may still use them; and so is a buffer."""
    b = StreamScript()
    b.new(10 * MILLION, line=BUILD, owner=(Role.PARAMETER, LAYERS[0]))
    groups = []
    for number in range(3):
        groups.append(
            ShardedGroup(api, f"layers.{number}", 2, (LAYERS[number],), ((mib * MILLION,),), "float32", **settings)
        )
        for owner in ((Role.UNSHARDED, LAYERS[number]), None):
            made = b.alloc(mib * MIB, stream=3, owner=owner)
            b.use(made, 0)
            b.free(made)
    return wrapped(b, *groups)


def test_nothing_limits_how_much_is_gathered_ahead() -> None:
    """If what was gathered were free at once, each buffer would take its block: 300 MiB, and 10."""
    finding = only(prefetch.find(gathered_on_a_stream(unlimited=True)), "prefetch-too-deep")
    assert (finding.severity, finding.num_bytes) == (Severity.WARNING, 300 * MIB)
    assert all_figures(finding) == [["300.00 MiB", "97%"], ["train.py:3"], ["310.00 MiB", "610.00 MiB"]]
    assert finding.evidence[1].num_bytes == 610 * MIB
    assert not prefetch.find(gathered_on_a_stream())
    assert not prefetch.find(gathered_on_a_stream(unlimited=True, mib=20))


def test_what_a_program_gathers_by_hand() -> None:
    """Weights of 100 MiB and biases of 2 of four layers, with two of which the peak would be 214."""
    b = TraceBuilder()
    parameter(b, "weight", 10)
    b.phase(PhaseKind.FORWARD)
    for number in range(4):
        b.new(100 * MILLION, line="train.py:8 main", owner=(Role.UNSHARDED, f"module.layers.{number}.weight"))
        b.new(2 * MILLION, line="train.py:7 main", owner=(Role.UNSHARDED, f"layers.{number}.bias"))
    b.new(500 * MILLION, device="cpu", owner=(Role.UNSHARDED, "layers.4.weight"))
    finding = only(prefetch.find(b.context()), "prefetch-too-deep")
    assert (finding.severity, finding.num_bytes) == (Severity.WARNING, 204 * MIB)
    assert all_figures(finding) == [
        ["4", "408.00 MiB", "204.00 MiB", "49%"],
        ["train.py:8"],
        ["[26214400]", "float32", "100.00 MiB", "aten.mm", "train.py:8", "4"],
        ["[524288]", "float32", "2.00 MiB", "aten.mm", "train.py:7", "4"],
    ]
    assert finding.evidence[0].source == "train.py:8 main"
    assert not prefetch.find(gathered())  # by FSDP, which says how far it goes ahead


def test_layers_that_are_gathered_again_are_not_whole_twice() -> None:
    """The second gather of a layer is a set of its own."""
    b = TraceBuilder()
    parameter(b, "weight", 10)
    b.phase(PhaseKind.FORWARD)
    for _ in range(3):
        for number in range(3):
            b.free(b.new(100 * MILLION, owner=(Role.UNSHARDED, f"layers.{number}.weight")))
    assert not prefetch.find(b.context())


def reduced(api: str | None, dtype: str = "bfloat16") -> Context:
    """Gradients in float32 of 200 MiB, and others of 100 in half precision, are reduced."""
    b = TraceBuilder()
    b.new(64 * MILLION, dtype="bfloat16", line=BUILD, owner=(Role.PARAMETER, "a"))
    b.phase(PhaseKind.BACKWARD)
    for of, mib in (("float32", 200), ("bfloat16", 100)):
        b.new(
            mib * MILLION,
            dtype=of,
            op="aten._to_copy",
            line="train.py:9 main",
            owner=(Role.COMMUNICATION, "reduce-scatter"),
        )
    return wrapped(b, *([] if api is None else [ShardedGroup(api, "", 2, ("a",), ((64 * MILLION,),), dtype)]))


@pytest.mark.parametrize(
    ("api", "dtype", "saved_mib", "share", "fix"),
    [
        (None, "", 200, "71%", "fix at train.py:9: reduce the bfloat16 gradients themselves"),
        (FSDP2, "bfloat16", 100, "35%", "fix at train.py:3: MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)"),
        (FSDP1, "float16", 100, "35%", "fix at train.py:3: MixedPrecision(reduce_dtype=torch.float16)"),
    ],
)
def test_copies_for_a_reduction(api: str | None, dtype: str, saved_mib: int, share: str, fix: str) -> None:
    """FSDP takes a buffer in half precision instead; of 282 MiB."""
    finding = only(float32_reduction.find(reduced(api, dtype)), "float32-reduction")
    assert (finding.severity, finding.num_bytes) == (Severity.NOTE, saved_mib * MIB)
    of = dtype or "bfloat16"
    assert figures(finding.title) == [of, "float32", "200.00 MiB", of, f"{saved_mib}.00 MiB", share]
    assert finding.evidence[0].text == fix and figures(finding.evidence[1].text) == [of]
    assert [figures(line.text)[1:4] for line in finding.evidence[2:]] == [["[52428800]", "float32", "200.00 MiB"]]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("api", "fix"), [(FSDP2, "set_requires_gradient_sync(False)"), (FSDP1, "no_sync()")])
def test_gradients_that_wait_for_the_last_micro_batch(api: str, fix: str, ranks: int) -> None:
    """Of 160 MiB a rank would keep its part; a shard of 4 MiB waits as well. The peak is 208 MiB."""
    b = TraceBuilder()
    parameter(b, "a", 26)
    parameter(b, "b", 18)
    b.phase(PhaseKind.FORWARD)
    b.phase(PhaseKind.BACKWARD)
    for name, mib in (("a", 100), ("b", 60), ("b", 4)):
        b.new(mib * MILLION, line="train.py:9 main", owner=(Role.GRADIENT, name))
    b.phase(PhaseKind.FORWARD, 1, 2)
    b.phase(PhaseKind.BACKWARD, 1, 2)
    last = b.new(100 * MILLION, owner=(Role.GRADIENT, "a"))  # of the last one, after which they are reduced
    b.free(last)
    b.phase(PhaseKind.OPTIMIZER_STEP)
    group = ShardedGroup(api, "", ranks, ("a", "b"), ((100 * MILLION,), (60 * MILLION,)), "float32")
    finding = only(unreduced_gradients.find(wrapped(b, group)), "unreduced-gradients")
    saved_mib = 160 * (ranks - 1) // ranks
    assert (finding.severity, finding.num_bytes) == (Severity.WARNING, saved_mib * MIB)  # of 308
    share = {2: "26%", 4: "39%"}[ranks]
    assert all_figures(finding)[:2] == [["160.00 MiB", f"{saved_mib}.00 MiB", share], ["train.py:3"]]
    assert finding.evidence[0].text.endswith(f"accumulate without {fix}")
    assert [line.num_bytes for line in finding.evidence[2:]] == [100 * MIB, 60 * MIB]


def test_a_flat_gradient_of_a_group_waits_as_well() -> None:
    b = TraceBuilder()
    parameter(b, "a", 26)
    b.phase(PhaseKind.BACKWARD)
    b.new(160 * MILLION, owner=(Role.GRADIENT, "_flat_param"))
    b.phase(PhaseKind.FORWARD, 1, 2)
    b.phase(PhaseKind.OPTIMIZER_STEP)
    group = ShardedGroup(FSDP1, "", 2, ("a", "b"), ((100 * MILLION,), (60 * MILLION,)), "float32")
    assert only(unreduced_gradients.find(wrapped(b, group)), "unreduced-gradients").num_bytes == 80 * MIB


# -- groups ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "stripped"),
    [
        ("module.layers.0.weight", "layers.0.weight"),
        ("_fsdp_wrapped_module.layers.0._checkpoint_wrapped_module.weight", "layers.0.weight"),
        ("_orig_mod.module", ""),
        ("submodule.weight", "submodule.weight"),
        ("layers.module_list.0", "layers.module_list.0"),
    ],
)
def test_what_wrappers_insert_is_no_part_of_a_name(name: str, stripped: str) -> None:
    assert strip_wrappers(name) == stripped


@pytest.mark.parametrize(("dtype", "size"), [("float64", 8), ("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_bytes_of_whole_parameters(dtype: str, size: int) -> None:
    group = ShardedGroup(FSDP2, "block", 2, ("block.a", "block.b"), ((3, 5), (7,)), dtype)
    assert full_bytes(group) == {"block.a": 15 * size, "block.b": 7 * size}
    is_in_group = name_filter(group)
    assert is_in_group("module.block.a") and is_in_group("block._flat_param") and not is_in_group("_flat_param")


def test_each_gather_of_a_group_is_a_list() -> None:
    b = TraceBuilder()
    names = ("a", "b", "a", "c", "b", "a")
    made = [b.new(1, owner=(Role.UNSHARDED, name)) for name in names]
    b.new(1, device="cpu", owner=(Role.UNSHARDED, "a"))
    group = ShardedGroup(FSDP2, "", 2, ("a", "b"), ((1,), (1,)), "float32")
    assert gathers(b.context(), [group]) == [[made[0], made[1]], [made[2], made[4]], [made[5]]]


def test_buffers_of_a_purpose_are_on_the_gpu_and_no_counters() -> None:
    b = TraceBuilder()
    for device, dtype, role, purpose in (
        ("cuda:0", "float32", Role.COMMUNICATION, "all-gather"),
        ("cuda:0", "float32", Role.COMMUNICATION, "reduce-scatter"),
        ("cpu", "float32", Role.COMMUNICATION, "all-gather"),
        ("cuda:0", "int64", Role.COMMUNICATION, "all-gather"),
        ("cuda:0", "float32", Role.BUFFER, "all-gather"),
        ("cuda:0", "bfloat16", Role.COMMUNICATION, "all-gather"),
    ):
        b.new(1, device=device, dtype=dtype, owner=(role, purpose))
    assert comm_buffers(b.trace, "all-gather") == [0, 5]


def test_the_line_of_a_group_is_that_of_its_shards_or_buckets() -> None:
    b = TraceBuilder()
    b.new(1, line=None, owner=(Role.PARAMETER, "a"))
    b.new(1, line="train.py:1 other", owner=(Role.PARAMETER, "c"))
    b.new(1, line="train.py:2 shard", owner=(Role.PARAMETER, "b"))
    b.new(1, line="train.py:3 bucket", owner=(Role.COMMUNICATION, "gradient bucket"))
    lines = [group_line(b.trace, ShardedGroup(api, "", 2, ("a", "b"), ((1,), (1,)), "float32")) for api in (DDP, FSDP1)]
    assert lines == ["train.py:3 bucket", "train.py:2 shard"]


# -- ranks -----------------------------------------------------------------------------------------------------------


def tensor(mib: int, count: int, category: Category, line: str, width: int = 1) -> LiveTensor:
    num_bytes = mib * MIB
    return LiveTensor(num_bytes // count, count, num_bytes, (width,), "uint8", category, None, "aten.mm", line, None)


ACTIVATIONS, PARAMETERS = Category.ACTIVATIONS, Category.PARAMETERS


def test_what_the_highest_rank_has_more_than_the_lowest() -> None:
    peaks = {
        3: ranks_differ.RankPeak(
            800 * MIB,
            {ACTIVATIONS: 500 * MIB, PARAMETERS: 300 * MIB},
            [tensor(300, 1, PARAMETERS, "a.py:2 f"), tensor(500, 5, ACTIVATIONS, "a.py:9 f")],
        ),
        1: ranks_differ.RankPeak(
            2000 * MIB,
            {PARAMETERS: 350 * MIB, ACTIVATIONS: 1500 * MIB, Category.INPUTS: 100 * MIB, Category.BUFFERS: 50 * MIB},
            [
                tensor(350, 1, PARAMETERS, "a.py:2 f"),
                tensor(1500, 3, ACTIVATIONS, "a.py:1 f"),
                tensor(200, 1, ACTIVATIONS, "a.py:9 f"),
                tensor(100, 1, Category.INPUTS, "a.py:3 f"),
                tensor(40, 1, Category.BUFFERS, "a.py:4 f"),
            ],
        ),
        2: ranks_differ.RankPeak(1100 * MIB, {}, ()),
    }
    finding = only(ranks_differ.find_differing_ranks(peaks), "ranks-differ")
    assert (finding.severity, finding.num_bytes) == (Severity.WARNING, 700 * MIB)
    assert all_figures(finding) == [
        ["1", "1.95 GiB", "3", "800.00 MiB", "1.27 GiB", "35%"],
        ["a.py:1", "3", "1"],
        ["1.46 GiB", "1", "500.00 MiB", "3"],
        ["100.00 MiB", "1", "0", "3"],
        ["350.00 MiB", "1", "300.00 MiB", "3"],
        ["3", "[1]", "uint8", "aten.mm", "a.py:1", "1.46 GiB", "1"],
        ["1", "[1]", "uint8", "aten.mm", "a.py:3", "100.00 MiB", "1"],
        ["1", "[1]", "uint8", "aten.mm", "a.py:2", "50.00 MiB", "1"],
    ]
    assert [line.num_bytes for line in finding.evidence[1:]] == [mib * MIB for mib in (1000, 100, 50, 1500, 100, 50)]
    assert not ranks_differ.find_differing_ranks({1: peaks[1]})


@pytest.mark.parametrize(
    "change",
    [{"category": PARAMETERS}, {"shape": (2,)}, {"dtype": "int8"}, {"op": "aten.bmm"}, {"source": "a.py:2 f"}],
)
def test_tensors_of_two_ranks_are_the_same_if_all_that_is_known_of_them_is(change: dict[str, object]) -> None:
    """The second rank has nothing like them in one case, and as many in the other."""
    own = tensor(1000, 1, ACTIVATIONS, "a.py:1 f")
    top = ranks_differ.RankPeak(1000 * MIB, {}, [own])

    def num_shown(other: LiveTensor) -> int:
        peaks = {0: top, 1: ranks_differ.RankPeak(0, {}, [other])}
        return len(only(ranks_differ.find_differing_ranks(peaks), "ranks-differ").evidence)

    assert (num_shown(own), num_shown(dataclasses.replace(own, **change))) == (1, 2)
