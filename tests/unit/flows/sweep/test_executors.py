"""Cells in real executors: local processes of which one is killed, a dask cluster, and processes that share a store."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from memprof.errors import MemprofError, UsageError
from memprof.flows.sweep.axes import build_script_grid, build_spec_grid
from memprof.flows.sweep.cells import answer_cell
from memprof.flows.sweep.executors import open_workers
from memprof.flows.sweep.questions import read_versions, to_payload
from memprof.flows.sweep.run import run_sweep
from memprof.report.documents.sweep import Sweep

GRID = {"model": "1M", "model_is_size": True, "gpu_vram_bytes": "1,2", "context_length": "16,32", "batch_size": "1,2,4"}
SWEEP = f"""
import sys
from memprof.flows.sweep.axes import build_spec_grid
from memprof.flows.sweep.run import run_sweep

if __name__ == "__main__":
    document = run_sweep(build_spec_grid({GRID}), exact=True, store=sys.argv[1], workers=1)
    print(document.count("run"), sum(row.answer.cached for row in document.rows))
"""


def _table(document):
    """All of a table but how long it took."""
    rows = [(row.values, row.on_frontier, {**row.answer.to_json()}) for row in document.rows]
    for _, _, answer in rows:
        del answer["run_seconds"], answer["cached"]
    return rows


def _run_here(**more):
    """The table of a sweep in a thread of this process."""
    with ThreadPoolExecutor(1) as executor:
        return run_sweep(build_spec_grid(GRID), executor, exact=True, workers=1, **more)


def test_a_cell_is_what_profile_says(monkeypatch):
    from memprof.flows.cost import compute_step_work
    from memprof.flows.gpus import find_spec_gpu
    from memprof.flows.profile import profile

    question = build_spec_grid(GRID).cells[-1].question
    trace, document = profile(question.spec)
    answer = answer_cell(to_payload(question), read_versions())
    assert (answer["how"], answer["fits"]) == ("run", document.verdict.fits)
    assert answer["needed_bytes"] == document.verdict.required_bytes
    seconds = compute_step_work(trace, find_spec_gpu(question.spec)).seconds
    assert answer["step_seconds"] == seconds
    refused = answer_cell(to_payload(question), {**read_versions(), "torch": "1.0"})
    assert f"process {os.getpid()}: torch " in refused["refused"] and refused["refused"].endswith("here 1.0")


def test_a_cell_that_fails_is_an_answer(monkeypatch):
    question = build_spec_grid({"model": "gpt2", "lora_rank": 4, "adapter": "lora", "lora_targets": "nosuch"}).cells[0]
    answer = answer_cell(to_payload(question.question), read_versions())
    assert answer["how"] == "failed" and "nosuch" in answer["reason"]


def test_there_is_no_such_executor():
    for name in ("ray:1", "dask:"):
        with pytest.raises(UsageError, match="no such executor"):
            run_sweep(build_spec_grid(GRID), name)


@pytest.mark.nightly
def test_a_killed_process_costs_no_answer(tmp_path):
    """Its cell is run again, and so is that beside it."""
    killed, others = [], _list_children()  # other tests' processes, which live on

    def kill(work):
        children = [pid for pid in _list_children() if pid not in others]
        if not killed and " 2 of 12 done" in work and children:
            killed.append(children[0])
            os.kill(children[0], signal.SIGKILL)

    document = run_sweep(
        build_spec_grid(GRID), exact=True, store=tmp_path, workers=2, progress=lambda work: kill(f" {work[7:]}")
    )
    assert killed and document.count("run") == 12 and document.ended == "complete"
    assert _table(document) == _table(_run_here(store=tmp_path / "b"))


def _list_children():
    folder = f"/proc/{os.getpid()}/task/{threading.get_native_id()}/children"
    with open(folder) as file:
        return [int(pid) for pid in file.read().split()]


@pytest.mark.nightly
def test_two_processes_share_a_store(tmp_path):
    """Each cell is run once, and both have all answers; one that is killed is gone on from."""
    command = [sys.executable, "-c", SWEEP, str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    counts = [tuple(map(int, process.communicate(timeout=300)[0].split())) for process in processes]
    assert [run for run, _ in counts] == [12, 12] and sum(cached for _, cached in counts) == 12
    assert len([*tmp_path.iterdir()]) == 12


@pytest.mark.nightly
def test_a_sweep_that_is_killed_is_gone_on_from(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", SWEEP, str(tmp_path)], stdout=subprocess.PIPE)
    end = time.monotonic() + 120
    while sum(not path.name.startswith(".") for path in tmp_path.iterdir()) < 3 and time.monotonic() < end:
        time.sleep(0.02)
    process.kill()
    process.communicate()
    for path in tmp_path.glob(".*.claim.*"):  # as if a minute had passed
        os.utime(path, (0, 0))
    num_before = sum(not path.name.startswith(".") for path in tmp_path.iterdir())
    document = _run_here(store=tmp_path)
    assert document.count("run") == 12 and sum(row.answer.cached for row in document.rows) == num_before >= 3
    assert _table(document) == _table(_run_here(store=tmp_path / "b"))


@pytest.fixture
def cluster():
    distributed = pytest.importorskip("distributed", reason="only make nightly installs it")
    with distributed.LocalCluster(
        n_workers=3, threads_per_worker=1, dashboard_address=None, silence_logs=50
    ) as cluster:
        yield cluster


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_a_dask_cluster_gives_the_same_table_though_a_worker_is_killed(tmp_path, cluster):
    killed = []

    def kill(work):
        if "3 of 12 done" in work and not killed:
            killed.append(next(iter(cluster.workers.values())).pid)
            os.kill(killed[0], signal.SIGKILL)

    name = f"dask:{cluster.scheduler_address}"
    document = run_sweep(build_spec_grid(GRID), name, exact=True, store=tmp_path, progress=kill)
    assert killed and document.count("run") == 12
    assert _table(document) == _table(_run_here(store=tmp_path / "b"))


def _has_profiler(dask_worker):
    callback = dask_worker.periodic_callbacks.get("profile")
    return callback is not None and callback.is_running()


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_no_profiler_holds_the_tensors_of_a_cell(cluster):
    """It did: of 96 cells, one needed 2 MiB more."""
    with open_workers(f"dask:{cluster.scheduler_address}", [], print, None), cluster.get_client() as client:
        cluster.scale(4)  # also of a worker that joins later
        client.wait_for_workers(4)
        assert {*client.run(_has_profiler).values()} == {False}
    with cluster.get_client() as client:
        assert {*client.run(_has_profiler).values()} == {True}


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_a_scheduler_that_ends_leaves_answers_to_go_on_from(tmp_path, cluster):
    def close(work):
        if "4 of 12 done" in work:
            cluster.close()

    name = f"dask:{cluster.scheduler_address}"
    begun = run_sweep(build_spec_grid(GRID), name, exact=True, store=tmp_path, progress=close)
    assert begun.ended == "stopped" and 4 <= begun.count("run") < 12
    assert begun.count("run") + begun.count("left") == 12
    document = _run_here(store=tmp_path)
    assert document.count("run") == 12
    assert sum(row.answer.cached for row in document.rows) == begun.count("run")
    with pytest.raises(MemprofError, match="cannot be reached"):
        run_sweep(build_spec_grid(GRID), name, exact=True, store=tmp_path / "b")


@pytest.mark.nightly
def test_a_script_is_swept_one_run_after_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(
        "import sys, torch\n"
        "model = torch.nn.Linear(1024, 1024).cuda()\n"
        "for _ in range(2):\n"
        "    model(torch.zeros(int(sys.argv[1]), 1024, device='cuda')).sum().backward()\n"
    )
    grid = build_script_grid(["train.py", "{batch}"], {"batch": "8,65536,x"}, {"gpu_vram_bytes": "0.7"})
    document = run_sweep(grid, store=tmp_path / "store")
    assert [row.answer.fits for row in document.rows] == [True, False, None]
    assert document.rows[2].answer.how == "failed" and "invalid literal" in document.rows[2].answer.reason


@pytest.mark.nightly
def test_few_runs_give_the_frontier_of_all_runs(tmp_path):
    """Of real cells, some of them near the limit, and with a search for fixes."""
    options = {"model": "pythia-70m", "gpu_vram_bytes": "1.5,3", "fix": "none,auto"}
    grid = build_spec_grid({**options, "context_length": "64,128,512", "batch_size": "1,4,16"})
    few = run_sweep(grid, store=tmp_path / "a")
    every = run_sweep(grid, store=tmp_path / "b", exact=True)
    assert [row.answer.fits for row in few.rows] == [row.answer.fits for row in every.rows]
    assert [row.on_frontier for row in few.rows] == [row.on_frontier for row in every.rows]
    assert few.count("run") < every.count("run") == 36
    assert {row.answer.fits for row in every.rows} == {True, False}


@pytest.mark.nightly
def test_ctrl_c_prints_the_table_so_far(tmp_path):
    words = ("--model-size", "1M", "--gpu-vram", "1,2", "--context-length", "8,16,32,64", "--batch-size", "1,2,3,4,5,6")
    command = [sys.executable, "-m", "memprof", "sweep", *words, "--exact", "--workers", "2", "--store", str(tmp_path)]
    process = subprocess.Popen(
        [*command, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A job in the background ignores it, and hands that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    end = time.monotonic() + 120
    while sum(not path.name.startswith(".") for path in tmp_path.iterdir()) < 4 and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    document = Sweep.from_json(json.loads(stdout))
    assert process.returncode == 130 and document.ended == "interrupted", stderr
    assert (
        document.count("run") + document.count("left") == 48 and document.count("run") >= 3
    )  # that of the fourth may come
    assert not [*tmp_path.glob(".*.claim.*")]
