"""Edits of small sources: only the place changes, and a place that cannot be changed safely is refused."""

from __future__ import annotations

import textwrap

import pytest

from memprof.findings.edits import Edit, EditKind
from memprof.flows.patch.edit import edit_source
from memprof.flows.patch.source import NoPatchError

DELETE, NUMBER, DETACHED, HOST = (
    EditKind.DELETE,
    EditKind.KEEP_NUMBER,
    EditKind.KEEP_DETACHED,
    EditKind.KEEP_ON_HOST,
)


def edit(kind: EditKind, text: str, name: str = "x") -> str:
    """Return `text` after an edit of its first line with `# <-`, without the marks."""
    text = textwrap.dedent(text).lstrip("\n")
    line = 1 + next(number for number, line in enumerate(text.split("\n")) if "# <-" in line)
    return edit_source(text.replace("  # <-", ""), Edit(kind, f"some file.py:{line} function", name))


def check(kind: EditKind, before: str, after: str, name: str = "x") -> None:
    assert edit(kind, before, name) == textwrap.dedent(after).lstrip("\n")


DELETED = {
    "at the end of a block": (
        "x = f()  # <-\ny = g(x)\nh()\n",
        "x = f()\ny = g(x)\ndel x\nh()\n",
    ),
    "in a loop": (
        "for i in r:\n    x = f()  # <-\n    g(x)  # so\n    h()\n",
        "for i in r:\n    x = f()\n    g(x)  # so\n    del x\n    h()\n",
    ),
    "after a whole block": (
        "def a():\n\tx = f()  # <-\n\tif c:\n\t\tg(x)\n\telse:\n\t\tpass\n\treturn 1\n",
        "def a():\n\tx = f()\n\tif c:\n\t\tg(x)\n\telse:\n\t\tpass\n\tdel x\n\treturn 1\n",
    ),
    "never used": ("x = f()  # <-\nh()\n", "x = f()\ndel x\nh()\n"),
    "a loop's variable": (
        "for x in loader:  # <-\n    y = g(x)\n    h(y)\n",
        "for x in loader:\n    y = g(x)\n    del x\n    h(y)\n",
    ),
    "set to None before": (
        "x = None  # <-\nfor i in r:\n    x = f()\n    g(x)\n",
        "x = None\nfor i in r:\n    x = f()\n    g(x)\n    del x\n",
    ),
    "assigned again later": (
        "for i in r:\n    x = f()  # <-\n    g(x)\nfor i in r:\n    x = f()\n    h(x)\n",
        "for i in r:\n    x = f()\n    g(x)\n    del x\nfor i in r:\n    x = f()\n    h(x)\n",
    ),
    "two loops in a loop": (
        "for e in r:\n    for i in r:\n        x = f()\n        g(x)\n    for i in r:\n        x = f()  # <-\n"
        "        h(x)\n",
        "for e in r:\n    for i in r:\n        x = f()\n        g(x)\n    for i in r:\n        x = f()\n        h(x)\n"
        "        del x\n",
    ),
    "another function's own": (
        "def a(x):\n    return x\ndef b():\n    x = 1\n    return x\nx = f()  # <-\na(x)\nb()\n",
        "def a(x):\n    return x\ndef b():\n    x = 1\n    return x\nx = f()\na(x)\ndel x\nb()\n",
    ),
    "several lines": (
        "x = f(\n    1,\n)  # <-\ny = g(\n    x,\n    'ä',\n)  # so\nh()\n",
        "x = f(\n    1,\n)\ny = g(\n    x,\n    'ä',\n)  # so\ndel x\nh()\n",
    ),
    "no end of line": ("x = f()  # <-\ng(x)", "x = f()\ng(x)\ndel x"),
    "lines of Windows": ("x = f()  # <-\r\ng(x)\r\n", "x = f()\r\ng(x)\r\ndel x\r\n"),
    "from a tuple": ("x, y = f()  # <-\ng(x)\nh(y)\n", "x, y = f()\ng(x)\ndel x\nh(y)\n"),
}


@pytest.mark.parametrize("name", DELETED)
def test_deleted(name):
    check(DELETE, *DELETED[name])


NOT_DELETED = {
    "read after its block": ("for i in r:\n    x = f()  # <-\n    g(x)\nprint(x)\n", "read in line 4"),
    "read in the next round": ("x = None\nfor i in r:\n    g(x)\n    x = f()  # <-\n", "read in line 3"),
    "read by the loop's test": ("x = 1\nwhile x:\n    x = f()  # <-\n", "read in line 2"),
    "read in a function": ("def a():\n    return x\nx = f()  # <-\ng(x)\n", "read in a function"),
    "read in a lambda": ("x = f()  # <-\na = lambda: x\n", "read in a function"),
    "a global": ("def a():\n    global x\n    x = f()  # <-\n    g(x)\n", "shared by functions"),
    "returned": ("def a():\n    x = f()  # <-\n    return x\n", "leaves the block"),
    "one line": ("for i in r: x = f(); g(x)  # <-\n", "several statements"),
    "two statements": ("x = f()  # <-\ng(x); h()\n", "several statements"),
    "deleted already": ("x = f()  # <-\ng(x)\ndel x\n", "deleted already"),
    "read in an else": ("if c:\n    x = f()  # <-\nelse:\n    g(x)\nh(x)\n", "read in line"),
    "added to": ("x = 0\nfor i in r:\n    x += 1\n    x = f(x)  # <-\n", "read in line 3"),
    "not this Python": ("x = f()  # <-\nprint x\n", "not valid Python"),
    "an argument": ("def a(x):  # <-\n    g(x)\n", "no statement assigns"),
}


@pytest.mark.parametrize("name", NOT_DELETED)
def test_not_deleted(name):
    text, reason = NOT_DELETED[name]
    with pytest.raises(NoPatchError, match=reason):
        edit(DELETE, text)


KEPT = {
    "a number": (NUMBER, "x.append(loss)  # <-\nprint(sum(x) / len(x))\n", "loss)", "loss.item())"),
    "a method's results": (NUMBER, "x.append(loss)  # <-\nprint(x[-1].item())\n", "loss)", "loss.detach())"),
    "of a loop's variable": (NUMBER, "x.append(loss)  # <-\nfor y in x:\n    y.mean()\n", "(loss)", "(loss.detach())"),
    "of a comprehension": (NUMBER, "x.append(a)  # <-\n[y.item() for y in x]\n", "append(a)", "append(a.detach())"),
    "given to torch": (NUMBER, "x.append(loss)  # <-\ntorch.stack(x)\n", "loss)", "loss.detach())"),
    "a sum": (NUMBER, "x += loss * 2  # <-\n", "loss * 2", "(loss * 2).item()"),
    "a sum written out": (NUMBER, "x = x + f(y)  # <-\n", "f(y)", "f(y).item()"),
    "an item": (NUMBER, "x['a'] = x['a'] + y  # <-\n", "+ y", "+ y.item()"),
    "host": (HOST, "x[i] = y  # <-\n", "= y", "= y.detach().cpu()"),
    "host after detach": (HOST, "self.x['a'].append(y.detach())  # <-\n", ".detach()", ".detach().cpu()"),
    "a list": (HOST, "x.append([y.clone() for y in z])  # <-\n", ".clone()", ".clone().detach().cpu()"),
    "a dict": (HOST, "x.append({'a': y, 'b': 1, 'c': y.item()})  # <-\n", "'a': y", "'a': y.detach().cpu()"),
    "an earlier value": (DETACHED, "x = f(y, x)  # <-\nx.sum().backward()\n", "y, x)", "y, x.detach())"),
    "an average": (NUMBER, "x = y if x is None else 0.9 * x + y  # <-\n", "* x", "* x.detach()"),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_kept(name):
    kind, text, old, new = KEPT[name]
    changed = edit(kind, text, "Meter.x['train']" if "self." in text else "x")
    assert changed == text.replace("  # <-", "").replace(old, new, 1)


NOT_KEPT = {
    "what runs backward": ("x = x + loss  # <-\nx.backward()\n", "backward pass"),
    "another line": ("y.append(loss)  # <-\n", "does not show"),
    "a function": ("def x(a):  # <-\n    return a\n", "does not show"),
}


@pytest.mark.parametrize("name", NOT_KEPT)
def test_not_kept(name):
    text, reason = NOT_KEPT[name]
    with pytest.raises(NoPatchError, match=reason):
        edit(NUMBER, text)
