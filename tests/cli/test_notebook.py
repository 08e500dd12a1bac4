"""A notebook is run: the magic, what a report shows of itself, a figure and a data frame."""

from __future__ import annotations

import json

import pytest

from tests.processes import python

pytestmark = pytest.mark.nightly  # unit/test_notebook.py has the magic without a kernel
CELLS = (
    "import torch\n%load_ext memprof",
    '%%memprof --gpu rtx-4090\nmodel = torch.nn.Linear(1024, 1024).to("cuda")\n'
    'model(torch.zeros(64, 1024, device="cuda")).sum().backward()',
    "report = _\nreport.plot()",
    'report.plot("treemap")',
    'report.frames()["tensors"][["category", "bytes"]].head(1)',
    "(report.peak.allocated_bytes, type(model).__name__, report.peak.tensors[0].source)",
)


RUN = """
import json, sys
import nbformat
from nbclient import NotebookClient

notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in json.loads(sys.argv[1])])
NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
print(json.dumps([cell["outputs"] for cell in notebook["cells"]]))
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Of each cell. The kernel is a process of its own, and so is what drives it: it leaves sockets open."""
    for package in ("nbclient", "ipykernel"):
        pytest.importorskip(package)
    done = python("-c", RUN, json.dumps(CELLS), folder=tmp_path_factory.mktemp("notebook"), libraries=("json",))
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def test_the_magic_draws_the_run_and_gives_the_report(outputs):
    drawn, shown = outputs[1]
    assert drawn["data"]["application/vnd.plotly.v1+json"]["data"]
    assert "<pre" in shown["data"]["text/html"] and "At the peak" in shown["data"]["text/html"]
    assert "NVIDIA GeForce RTX 4090" in shown["data"]["text/html"]
    peak, kind, source = eval(outputs[5][0]["data"]["text/plain"])
    assert peak >= 2 * 4 * 1024 * 1024  # parameters and their gradients
    assert (kind, source) == ("Linear", "cell 2:2 <module>")


def test_figures_and_frames_show_themselves(outputs):
    for place, kind in ((2, "scatter"), (3, "treemap")):
        (shown,) = outputs[place]
        figure = shown["data"]["application/vnd.plotly.v1+json"]
        assert {trace["type"] for trace in figure["data"]} == {kind}
    assert "<table" in outputs[4][0]["data"]["text/html"]
