"""The frames of a traceback, as Python, IPython, rich and launchers print them."""

from __future__ import annotations

import pytest

from memprof.doctor.log_lines import Passage
from memprof.doctor.tracebacks import TracebackFrame, choose_frames, read_frames

LIBRARY = "/opt/lib/python3.12/site-packages"
NET = TracebackFrame("/w/net.py", 31, "forward", "return self.layer(x)")


def frames(before: str, after: str = "OutOfMemoryError: CUDA out of memory") -> list[TracebackFrame]:
    return read_frames(Passage(before, after, 1))


@pytest.mark.parametrize(
    "text",
    [
        '  File "/w/net.py", line 31, in forward\n    return self.layer(x)\n',
        '  File "/w/net.py", line 31, in forward\n    return self.layer(x)\n           ^^^^^^^^^^^^^\n',
        '[rank0]:   File "/w/net.py", line 31, in forward\n[rank0]:     return self.layer(x)\n',
        "File /w/net.py:31, in forward(self, x)\n     30 y = 1\n---> 31 return self.layer(x)\n     32 z = 2\n",
        "/w/net.py in forward\n/w/net.py:31 in forward(self)\n---> 31 return self.layer(x)\n",
        "│ /w/net.py:31 in forward                      │\n│   30 y = 1   │\n│ ❱ 31 │   return self.layer(x)    │\n",
    ],
    ids=["python", "markers", "torchrun", "ipython", "older ipython", "rich"],
)
def test_a_frame_in_each_format(text: str):
    assert frames(text) == [NET]


def test_frames_without_code_or_function():
    assert frames('  File "/w/net.py", line 31\n') == [TracebackFrame("/w/net.py", 31, "")]
    two = '  File "/w/a.py", line 1, in f\n  File "/w/b.py", line 2, in g\n    ~~^~~\n'
    assert frames(two) == [TracebackFrame("/w/a.py", 1, "f"), TracebackFrame("/w/b.py", 2, "g")]


def test_the_code_of_the_next_frame_is_its_own():
    found = frames(
        '  File "/w/a.py", line 1, in f\n  File "/w/net.py", line 31, in forward\n    return self.layer(x)\n'
    )
    assert found == [TracebackFrame("/w/a.py", 1, "f"), NET]


def test_a_cell_of_a_notebook():
    found = frames("Cell In[7], line 3\n      2 x = 1\n----> 3 model(x)\n")
    assert found == [TracebackFrame("In[7]", 3, "", "model(x)")]


def test_the_last_traceback_counts():
    text = 'Traceback (most recent call last):\n  File "/w/{}.py", line 1, in f\n    g()\n'
    assert [one.file for one in frames(text.format("a") + "ValueError\n\n" + text.format("b"))] == ["/w/b.py"]


def test_lines_of_other_ranks_are_left_out():
    text = '[rank1]:   File "/w/a.py", line 1, in f\n[rank0]:   File "/w/b.py", line 2, in g\n'
    assert [one.file for one in frames(text, "[rank0]: OutOfMemoryError\n[rank1]: x")] == ["/w/b.py"]
    assert [one.file for one in frames(text, "ERROR [rank0]: OutOfMemoryError")] == ["/w/b.py"]
    assert [one.file for one in frames(text, "OutOfMemoryError\n[rank0]: x")] == ["/w/a.py", "/w/b.py"]


def test_a_process_whose_number_begins_with_another_s_is_another():
    text = '(Worker pid=123) File "/w/a.py", line 1, in f\n(Worker pid=12) File "/w/b.py", line 2, in g\n'
    assert [one.file for one in frames(text, "(Worker pid=12) OutOfMemoryError")] == ["/w/b.py"]


def in_file(path: str) -> TracebackFrame:
    return TracebackFrame(path, 1, "f")


USER, HELPER = in_file("/w/train.py"), in_file("/w/net.py")
HF, TORCH = in_file(f"{LIBRARY}/transformers/trainer.py"), in_file(f"{LIBRARY}/torch/nn/modules/linear.py")
STANDARD = in_file("/usr/lib/python3.12/contextlib.py")


@pytest.mark.parametrize(
    ("all_frames", "chosen"),
    [
        ([USER, HELPER, TORCH], [HELPER]),
        ([USER, HELPER, HF, TORCH], [HF, HELPER]),
        ([HF, TORCH], [HF]),
        ([USER, STANDARD, TORCH], [USER]),
        ([STANDARD, TORCH], [TORCH]),
        ([in_file("<frozen runpy>")], [in_file("<frozen runpy>")]),
        ([], []),
    ],
)
def test_the_frames_that_are_shown(all_frames: list[TracebackFrame], chosen: list[TracebackFrame]):
    assert choose_frames(all_frames) == chosen


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (NET, "/w/net.py:31 forward: return self.layer(x)"),
        (TracebackFrame("/w/net.py", 31, ""), "/w/net.py:31"),
        (TracebackFrame(f"{LIBRARY}/torch/a.py", 2, "f"), "torch/a.py:2 f"),
        (TracebackFrame(r"C:\py\Lib\site-packages\torch\a.py", 2, "f"), "torch/a.py:2 f"),
        (TracebackFrame("/usr/lib/python3/dist-packages/b.py", 2, "f"), "b.py:2 f"),
    ],
)
def test_a_frame_is_shown_from_its_package_on(frame: TracebackFrame, text: str):
    assert str(frame) == text
