"""The capture file: what is saved comes back; what is no capture is refused in one line."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path

import pytest

from memprof.errors import MemprofError, UsageError
from memprof.run_spec import RunSpec
from memprof.spec import TargetSpec
from memprof.trace.events import (
    NONE,
    BatchLoader,
    Caller,
    CheckpointedLine,
    DeviceMismatch,
    EvalCall,
    Event,
    EventKind,
    Forward,
    FrozenInVain,
    Holder,
    Module,
    ModuleRole,
    Operand,
    Owner,
    Phase,
    PhaseKind,
    Role,
    Storage,
    StreamEvent,
    Trace,
    Use,
    VmapCall,
    Wait,
    Workspace,
)
from memprof.trace.facts import DeviceFacts, Facts, ProgramFacts, ShardedGroup, Target
from memprof.trace.io import SCHEMA, load_trace, save_trace


def sample() -> Trace:
    return Trace(
        events=[
            Event(EventKind.PHASE, 0),
            Event(EventKind.ENTER, 0),
            Event(EventKind.ALLOC, 0),
            Event(EventKind.FREE, 0),
        ],
        storages=[Storage(513, (3, 171), "int8", "cuda:0", 0, 0, 0, 0, NONE, False)],
        last_uses=[3],
        callers=[Caller(0, 0, "torch.func.vmap")],
        checkpointed_lines=[CheckpointedLine(0, 0)],
        ops=["aten.empty"],
        modules=[Module("model.layers.0", "Layer", ModuleRole.LAYER, "model.layers")],
        sources=["/home/ä/train.py:3 main"],
        phases=[Phase(PhaseKind.FORWARD, 1, 2)],
        owners={0: Owner(Role.GRADIENT, "weight")},
        mismatches=[
            DeviceMismatch(2, 0, 0, 0, (Operand("cuda:0", (2,), "float32", NONE), Operand("cpu", (), "int64", 0)))
        ],
        workspaces=[Workspace(2, "cuda:0", 512, 1024)],
        assumptions=["One."],
        facts=Facts(
            device=DeviceFacts("A", 1 << 30), target=Target(TargetSpec(model="a.json", steps=3), "a", dtype="float32")
        ),
        forwards=[Forward(1, 3, 0, 0, True, 7, (0,))],
        holders=[Holder(4, "list", "losses", "/home/ä/train.py:3 main", True, None, (0,), 7, 1, None)],
        idle_holders=[Holder(4, "", "out", None, False, None, (0,), 0, 0, None)],
        error_holders=[Holder(4, "except", "main", None, False, None, (0,), 0, 0, None)],
        vmaps=[VmapCall(1, 3, 64, "jacrev", 0)],
        loaders=[BatchLoader(16, 0, 3)],
        failed_forward=Forward(3, 4, 0, 0, False, 7, ()),
        eval_calls=[EvalCall(3, 0, 0)],
        frozen_in_vain=[FrozenInVain(0, None, (0,))],
        unused_no_grads=["/home/ä/train.py:2 main"],
        column_broadcasts=[0],
    )


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "run.memprof"
    save_trace(sample(), path)
    assert load_trace(path) == sample()
    assert [file.name for file in tmp_path.iterdir()] == ["run.memprof"]


def test_what_is_new_in_it_decides_the_schema(tmp_path: Path) -> None:
    plain, emptied, streams, buckets, lent, whole = (sample() for _ in range(6))
    whole.owners[0] = Owner(Role.UNSHARDED, "weight")
    group = ShardedGroup("fully_shard", "", 8, ("weight",), ((2, 3),), "bfloat16", kept=True)
    whole.facts = dataclasses.replace(whole.facts, groups=(group,))
    lent.uses.append(Use(0, 33))
    lent.waits.append(Wait(True, (StreamEvent("cuda:0", 33, 1),)))
    lent.events += [Event(EventKind.USE, 0), Event(EventKind.WAIT, 0)]
    buckets.owners[0] = Owner(Role.COMMUNICATION, "")
    emptied.events.append(Event(EventKind.EMPTY_CACHE, 0))
    streams.events += [Event(EventKind.EMPTY_CACHE, 0), Event(EventKind.STREAM, 33)]
    for trace, schema in ((plain, 1), (emptied, 2), (streams, 3), (buckets, 3), (lent, 4), (whole, 5)):
        save_trace(trace, tmp_path / "a")
        with gzip.open(tmp_path / "a") as file:
            assert json.load(file)["schema"] == schema <= SCHEMA
        assert load_trace(tmp_path / "a") == trace


def test_names_of_earlier_releases(tmp_path: Path) -> None:
    """Tables keep their names in the file; facts of early captures have old ones, those of other ranks too."""
    trace = sample()
    trace.gpus = {"cuda:0": True, "cuda:1": False}
    trace.updates_parameters_manually = trace.ended_out_of_memory = True
    asked = RunSpec(no_stubs=True, shown_gpu=1)
    trace.facts = Facts(program=ProgramFacts(("train.py",), "exit", 0, 3, (), asked=asked))
    trace.others = [dataclasses.replace(trace, others=[])]
    save_trace(trace, tmp_path / "a")
    assert load_trace(tmp_path / "a") == trace
    with gzip.open(tmp_path / "a") as file:
        document = json.load(file)
    assert document["cards"] == trace.gpus and document["updates_itself"] and document["cut_short"]
    for facts in (document["facts"], document["others"][0]["facts"]):
        values = facts["program"]["asked"]
        values["no_stand_ins"], values["shown_card"] = values.pop("no_stubs"), values.pop("shown_gpu")
    (tmp_path / "b").write_bytes(gzip.compress(json.dumps(document).encode()))
    loaded = load_trace(tmp_path / "b")
    assert loaded == trace and loaded.others == trace.others


def test_types_survive(tmp_path: Path) -> None:
    save_trace(sample(), tmp_path / "a")
    trace = load_trace(tmp_path / "a")
    assert isinstance(trace.events[0].kind, EventKind) and isinstance(trace.modules[0].role, ModuleRole)
    assert isinstance(trace.storages[0].shape, tuple) and isinstance(trace.phases[0].kind, PhaseKind)
    assert isinstance(trace.mismatches[0].operands[0], Operand)


def test_saving_into_no_folder(tmp_path: Path) -> None:
    with pytest.raises(MemprofError, match="no such folder") as raised:
        save_trace(sample(), tmp_path / "missing" / "a")
    assert raised.value.exit_code == 2


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    save_trace(sample(), path)
    before = path.read_bytes()
    trace = sample()
    trace.facts = Facts(command=object())
    with pytest.raises(TypeError):
        save_trace(trace, path)
    assert path.read_bytes() == before


def damaged(**changes: object) -> bytes:
    document = {
        "format": "memprof capture", "schema": SCHEMA, "source": "simulated", "facts": {}, "assumptions": [], "ops": [],
        "sources": [], "modules": [], "phases": [[str(PhaseKind.OTHER), 0, 0]], "owners": [], "mismatches": [],
        "storages": [], "events": {"kind": [2], "ref": [0]},
    } | changes  # fmt: skip
    return gzip.compress(json.dumps(document).encode(), mtime=0)


def test_the_undamaged_document_loads(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(damaged())
    assert load_trace(tmp_path / "a").events == [Event(EventKind.PHASE, 0)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a memprof capture|damaged"),
        (b"no gzip", "not a memprof capture"),
        (gzip.compress(b"no JSON", mtime=0), "not a memprof capture"),
        (gzip.compress(b'{"format": "else"}', mtime=0), "not a memprof capture"),
        (gzip.compress(b"[1]", mtime=0), "not a memprof capture"),
        (damaged()[:-12], "truncated or damaged"),
        (damaged(schema=SCHEMA + 1), "newer memprof"),
        (damaged(schema=None), "newer memprof"),
        (damaged(events={"kind": [99], "ref": [0]}), "damaged"),
        (damaged(events={"kind": [0], "ref": [0]}), "damaged"),
        (damaged(events={"kind": [2, 2], "ref": [0]}), "damaged"),
        (damaged(storages=[[1]]), "damaged"),
        (damaged(storages=[[1, [1], "int8", "cuda:0", 0, -1, -1, 0, -1, False]]), "damaged"),
        (damaged(phases=[["lunch", 0, 0]]), "damaged"),
        (damaged(forwards=[[0, 1, 0, 0, True, 0, [3]]]), "damaged"),
        (damaged(callers=[[1, 0, ""]]), "damaged"),
        (damaged(checkpointed_lines=[[0, 9]]), "damaged"),
        (damaged(last_uses=[1, 2]), "damaged"),
        (damaged(last_uses=[2]), "damaged"),  # the storage is allocated by the event of that index
        (damaged(last_uses=[5]), "damaged"),  # there are four events
        (damaged(last_uses=[-2]), "damaged"),
        (damaged(idle_holders=[[0, "", "out", None, False, None, [1], 0, 0, None]]), "damaged"),
        (damaged(error_holders=[[0, "except", "main", None, False, None, [1], 0, 0, None]]), "damaged"),
        (damaged(failed_forward=[0, 1, 9, 0, True, 0, []]), "damaged"),
        (damaged(eval_calls=[[0, 0, 9]]), "damaged"),
        (damaged(frozen_in_vain=[[9, None, [0]]]), "damaged"),
        (damaged(frozen_in_vain=[[0, None, [9]]]), "damaged"),
        (damaged(column_broadcasts=[9]), "damaged"),
        (damaged(vmaps=[[1, 99, 2, "vmap", 0]]), "damaged"),
        (damaged(vmaps=[[0, 1, 2, "vmap", 9]]), "damaged"),
        (damaged(loaders=[[16, 9]]), "damaged"),
        (damaged(holders=[[0, "list", "losses", None, False, None, [-1], 0, 0, None]]), "damaged"),
    ],
)  # fmt: skip
def test_what_is_no_capture(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message) as raised:
        load_trace(path)
    assert str(path) in str(raised.value)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        load_trace(tmp_path / "a")


def test_look_ups() -> None:
    trace = sample()
    storage = trace.storages[0]
    assert (trace.op(storage), trace.module_path(storage)) == ("aten.empty", "model.layers.0")
    assert trace.source_line(storage) == "/home/ä/train.py:3 main"
    nowhere = storage._replace(module=NONE, source=NONE)
    assert trace.module_path(nowhere) is None and trace.source_line(nowhere) is None
