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
    "in an f-string": (
        'x = f()  # <-\nprint(f"""\n\n{x:>{x}}""")\nh()\n',
        'x = f()\nprint(f"""\n\n{x:>{x}}""")\ndel x\nh()\n',
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
    "a comprehension's": ("y = [x for x in r]  # <-\ng(x)\n", "no statement assigns"),
    "an argument": ("def a(x):  # <-\n    g(x)\n", "no statement assigns"),
}


@pytest.mark.parametrize("name", NOT_DELETED)
def test_not_deleted(name):
    text, reason = NOT_DELETED[name]
    with pytest.raises(NoPatchError, match=reason):
        edit(DELETE, text)


def test_a_variable_of_a_module_is_not_deleted():
    with pytest.raises(NoPatchError, match="other files may read"):
        edit_source("x = f()\ng(x)\n", Edit(DELETE, "file.py:1 <module>", "x"), is_script=False)


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
    "a dict that is computed": (HOST, "x.append({n: y.clone() for n, y in z})  # <-\n", "e()", "e().detach().cpu()"),
    "in place": (DETACHED, "m.x.mul_(0.9).add_(y.mean())  # <-\n", "y.mean())", "y.mean().detach())"),
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


def test_a_carried_tuple():
    text = "for x in r:\n    out, h = lstm(x, h)  # <-\n    out.sum().backward()\n"
    detached = "    h = tuple(part.detach() for part in h)\n"
    assert edit(DETACHED, text, "h[0]") == text.replace("  # <-", "") + detached


def test_states_that_are_carried_through_a_window():
    text = "for w in r:\n    for x in w:\n        y, h, c = f(x, h, c)  # <-\n    y.sum().backward()\n"
    detached = "    c = c.detach()\n    h = h.detach()\n"
    assert edit(DETACHED, text, "h, c") == text.replace("  # <-", "") + detached


@pytest.mark.parametrize(
    ("container", "kept"),
    [
        ("tuple", "tuple(part.detach().cpu() for part in f(y))"),
        ("list", "[part.detach().cpu() for part in f(y)]"),
        ("dict", "{key: part.detach().cpu() for key, part in f(y).items()}"),
    ],
)
def test_a_container(container, kept):
    assert edit_source("x.append(f(y))\n", Edit(HOST, "a.py:1 f", "x", container)) == f"x.append({kept})\n"


def test_a_state_dict():
    text = "x[i] = copy.deepcopy(model.state_dict())  # <-\n"
    kept = "x[i] = {name: value.cpu() for name, value in copy.deepcopy(model.state_dict()).items()}\n"
    assert edit(HOST, text) == kept


LOADED = {
    "without": ("x = torch.load(path)  # <-\n", 'x = torch.load(path, map_location="cpu")\n'),
    "with another": (
        "x = torch.load(path, map_location=device, weights_only=True)  # <-\n",
        'x = torch.load(path, map_location="cpu", weights_only=True)\n',
    ),
    "by position": ("x = torch.load(path, 'cuda')['model']  # <-\n", "x = torch.load(path, \"cpu\")['model']\n"),
    "several lines": (
        "x = torch.load(  # <-\n    path,\n)\n",
        'x = torch.load(\n    path,\nmap_location="cpu")\n',
    ),
}


@pytest.mark.parametrize("name", LOADED)
def test_loaded_to_the_host(name):
    check(EditKind.LOAD_ON_HOST, *LOADED[name])


ERRORS = {
    "in a list": ("errors.append(error)  # <-", "errors.append(str(error))"),
    "in a tuple": ("errors.append((size, error))  # <-", "errors.append((size, str(error)))"),
    "in a dict": ("errors[size] = error  # <-", "errors[size] = str(error)"),
    "in a variable": ("errors = error  # <-", "errors = str(error)"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_the_text_of_an_error(name):
    before, after = (f"try:\n    f()\nexcept E as error:\n    {line}\nprint(errors)\n" for line in ERRORS[name])
    check(EditKind.KEEP_ERROR_TEXT, before, after, "errors")


def test_an_error_that_is_raised_again():
    with pytest.raises(NoPatchError, match="raised again"):
        edit(EditKind.KEEP_ERROR_TEXT, "try:\n    f()\nexcept E as e:\n    x = e  # <-\nif x:\n    raise x\n")


def test_gradients_are_freed_after_the_step():
    check(
        EditKind.FREE_GRADIENTS,
        """
        for batch in loader:
            optimizer.zero_grad()
            model(batch).backward()  # <-
            scaler.step(optimizer)  # so
            scheduler.step()
        """,
        """
        for batch in loader:
            optimizer.zero_grad()
            model(batch).backward()
            scaler.step(optimizer)  # so
            optimizer.zero_grad(set_to_none=True)
            scheduler.step()
        """,
    )


def test_gradients_of_two_optimizers():
    text = "o.zero_grad()\no2.zero_grad()\nf()  # <-\no2.step()\no.step()\n"
    freed = "o2.step()\no2.zero_grad(set_to_none=True)\no.step()\no.zero_grad(set_to_none=True)\n"
    assert edit(EditKind.FREE_GRADIENTS, text).endswith(f"f()\n{freed}")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("o.zero_grad()\nf()  # <-\no.step()\nprint(p.grad)\n", "may be read after line 3"),
        ("m.zero_grad()\nf()  # <-\no.step()\nif c:\n    p.step()\n", "may be read after line 3"),
        ("o.zero_grad()\nif c:  # <-\n    o.step()\n", "no block calls"),
        ("f()  # <-\no.step()\no.zero_grad()\n", "no block calls"),
    ],
)
def test_gradients_that_are_not_freed(text, reason):
    with pytest.raises(NoPatchError, match=reason):
        edit(EditKind.FREE_GRADIENTS, text)


WITHOUT_GRADIENTS = {
    "a loop": (
        "import torch\nfor x in r:\n    y = m(x)  # <-\n\n    f(y)\nh()\n",
        "import torch\nwith torch.no_grad():\n    for x in r:\n        y = m(x)\n\n        f(y)\nh()\n",
    ),
    "a function": (
        "import torch\nclass A:\n    @staticmethod\n    def a():\n        for x in r:\n            m(x)  # <-\n",
        "import torch\nclass A:\n    @staticmethod\n    @torch.no_grad()\n    def a():\n        for x in r:\n"
        "            m(x)\n",
    ),
    "in a training loop": (
        "import torch\nfor e in r:\n\tm(e).backward()\n\tif c:\n\t\ty = m(x)  # <-\n\tf()\n",
        "import torch\nfor e in r:\n\tm(e).backward()\n\twith torch.no_grad():\n\t\tif c:\n\t\t\ty = m(x)\n\tf()\n",
    ),
}


@pytest.mark.parametrize("name", WITHOUT_GRADIENTS)
def test_called_without_gradients(name):
    check(EditKind.NO_GRADIENTS, *WITHOUT_GRADIENTS[name])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("from torch import nn\nm(x)  # <-\n", "does not import torch"),
        ("import torch\nfor x in r:\n    m(x)  # <-\n    f('''a\n    b''')\n", "several lines"),
        ("import torch\nm(x).backward()  # <-\n", "trains as well"),
        ("import torch\nfor x in r: m(x)  # <-\nasync def f(): m(x)\n", None),
        ("import torch\nf(); m(x)  # <-\n", "several statements"),
    ],
)
def test_not_called_without_gradients(text, reason):
    if reason is None:
        assert "    for x in r: m(x)" in edit(EditKind.NO_GRADIENTS, text)
        return
    with pytest.raises(NoPatchError, match=reason):
        edit(EditKind.NO_GRADIENTS, text)


RETRIED = {
    "alone": (
        "try:\n    f(a)\nexcept E:\n    # smaller\n    f(b)  # <-\n    g()\nh()\n",
        "ran_out_of_memory = False\ntry:\n    f(a)\nexcept E:\n    # smaller\n    ran_out_of_memory = True\n"
        "if ran_out_of_memory:\n    f(b)\n    g()\nh()\n",
    ),
    "after a test of the error": (
        "while c:\n    try:\n        f(a)\n    except E as e:\n        if 'memory' not in str(e):\n            raise\n"
        "        f(b)  # <-\n",
        "while c:\n    ran_out_of_memory = False\n    try:\n        f(a)\n    except E as e:\n"
        "        if 'memory' not in str(e):\n            raise\n        ran_out_of_memory = True\n"
        "    if ran_out_of_memory:\n        f(b)\n",
    ),
}


@pytest.mark.parametrize("name", RETRIED)
def test_retried_after_the_handler(name):
    check(EditKind.RETRY_AFTER_HANDLER, *RETRIED[name])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("try:\n    f(a)\nexcept E:\n    f(b)  # <-\nfinally:\n    g()\n", "another block"),
        ("try:\n    f(a)\nexcept E:\n    f(b)  # <-\nexcept G:\n    g()\n", "another block"),
        ("try:\n    f(a)\nexcept E as e:\n    f(b, e)  # <-\n", "reads the error"),
        ("try:\n    f(a)\nexcept E:\n    try:\n        f(b)  # <-\n    except G:\n        raise\n", "reads the error"),
        ("try:\n    f(a)\nexcept E: f(b)  # <-\n", "several statements"),
        ("f(b)  # <-\n", "in no `except` block"),
    ],
)
def test_not_retried(text, reason):
    with pytest.raises(NoPatchError, match=reason):
        edit(EditKind.RETRY_AFTER_HANDLER, text)


def test_the_gradient_is_taken():
    check(
        EditKind.TAKE_GRADIENT,
        """
        import torch
        def penalty(x):
            critic(x).sum().backward(create_graph=True)  # <-
            return x.grad.norm() + x.grad.sum()
        """,
        """
        import torch
        def penalty(x):
            x_grad = torch.autograd.grad(critic(x).sum(), x, create_graph=True)[0]
            return x_grad.norm() + x_grad.sum()
        """,
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import torch\nl.backward(create_graph=True)  # <-\nf([p.grad for p in ps], x.grad)\n", "not the .grad"),
        ("import torch\nl.backward(g, create_graph=True)  # <-\nf(x.grad)\n", "other arguments"),
        ("import torch\nf(l)  # <-\n", "no call of backward"),
    ],
)
def test_a_gradient_that_is_not_taken(text, reason):
    with pytest.raises(NoPatchError, match=reason):
        edit(EditKind.TAKE_GRADIENT, text)


FUNCTION = "class F(Function):\n    def forward(ctx, x):\n{}    def backward(ctx, g):\n{}"
SAVED = {
    "a result": (
        ("        ctx.y = x.exp()  # <-\n        return ctx.y\n", "        return g * ctx.y\n"),
        (
            "        y = x.exp()\n        ctx.save_for_backward(y)\n        return y\n",
            "        return g * ctx.saved_tensors[0]\n",
        ),
    ),
    "a variable": (
        ("        z = x.exp()\n        ctx.y = z  # <-\n        return z\n", "        return g * ctx.y\n"),
        (
            "        z = x.exp()\n        ctx.save_for_backward(z)\n        return z\n",
            "        return g * ctx.saved_tensors[0]\n",
        ),
    ),
}


@pytest.mark.parametrize("name", SAVED)
def test_saved_for_the_backward(name):
    before, after = (FUNCTION.format(*methods) for methods in SAVED[name])
    check(EditKind.SAVE_FOR_BACKWARD, before, after, "y")


@pytest.mark.parametrize(
    ("methods", "reason"),
    [
        (("        ctx.save_for_backward(x)\n        ctx.y = x + 1  # <-\n", "        return g\n"), "already"),
        (("        ctx.y = x + 1  # <-\n        ctx.y = x\n", "        return g\n"), "several places"),
        (("        ctx.y = x + 1  # <-\n", "        return f'{ctx.y}'\n"), "in the f-string of line"),
        (("        y = 1\n        ctx.y = x + y  # <-\n", "        return g\n"), "a variable as well"),
        (("        ctx.y = x + 1  # <-\n", "        return g + g.y\n"), "of another object"),
    ],
)
def test_not_saved_for_the_backward(methods, reason):
    with pytest.raises(NoPatchError, match=reason):
        edit(EditKind.SAVE_FOR_BACKWARD, FUNCTION.format(*methods), "y")
