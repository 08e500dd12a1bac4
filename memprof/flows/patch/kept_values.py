"""What a container, an attribute or a running sum keeps of each step: a number, no graph, or host memory."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from memprof.findings.edits import EditKind
from memprof.flows.patch.source import Change, NoPatchError, Source

_FILLING_METHODS = ("append", "appendleft", "extend", "insert", "add", "update", "setdefault", "put")
_IN_PLACE_METHODS = ("add_", "copy_", "lerp_")  # of tensors: what they add is their first argument
_SUFFIXES = {
    EditKind.KEEP_NUMBER: ".item()",
    EditKind.KEEP_DETACHED: ".detach()",
    EditKind.KEEP_ON_HOST: ".detach().cpu()",
    EditKind.KEEP_OUTPUTS_ON_HOST: ".cpu()",
}
_NUMBERS = ("item", "tolist", "float", "int", "len")  # functions and methods whose results are no tensors


# Of each kind of container: the text before and after a part with its suffix, where the parts come from `{}`.
_PARTS = {
    "tuple": ("tuple(part", " for part in {})"),
    "list": ("[part", " for part in {}]"),
    "dict": ("{{key: part", " for key, part in {}.items()}}"),
}


def keep_less(source: Source, line: int, name: str, kind: EditKind, container: str = "") -> list[Change]:
    """Return the changes of the statement at `line` that adds a value to `name`, so that it keeps less of the value.

    `container`: what the value is, if it is no tensor (`Edit.container`).

    Raises NoPatchError: no such statement, or the program needs the graph of what is kept.
    """
    if ", " in name:
        return [change for one in name.split(", ") for change in keep_less(source, line, one, kind, container)]
    variable = name.partition("[")[0].rpartition(".")[2]
    statements = source.list_statements(line)
    values = [value for one in statements for value in find_values(one, variable)]
    earlier = [value for one in statements for value in _find_earlier(one, variable)]
    if not values and not earlier:
        raise NoPatchError(f"line {line} does not show what it adds to `{name}`")
    parents = [parent for use in _list_uses(source.tree, variable) for parent in _list_readers(source, use)]
    if any(isinstance(one, ast.Attribute) and one.attr == "backward" for one in parents):
        raise NoPatchError(f"a backward pass begins at `{name}`")
    needs_tensors = any(map(_needs_tensor, parents))
    suffix = _SUFFIXES[EditKind.KEEP_DETACHED if kind is EditKind.KEEP_NUMBER and needs_tensors else kind]
    changes = [change for value in values for change in _add_suffix(source, value, suffix, container)]
    for value in earlier:
        changes += _detach_earlier(source, value, is_tuple="[" in name)
    return list(dict.fromkeys(changes))


def _detach_earlier(source: Source, value: ast.expr, *, is_tuple: bool) -> list[Change]:
    """Return the changes that detach a variable from which its statement computes the next value: where it is read; if
    the statement assigns to others too, or a loop without a backward runs it, at the end of the block that has one."""
    statement, detached = source.find_statement(value), _SUFFIXES[EditKind.KEEP_DETACHED]
    block = _find_block_with_backward(source, statement)
    if not _assigns_several(statement) and statement in block:
        return list(_add_suffix(source, value, detached))
    text = source.read(value)
    new = f"tuple(part{detached} for part in {text})" if is_tuple else f"{text}{detached}"
    return [source.insert_after(block[-1], f"{text} = {new}")]


def _find_block_with_backward(source: Source, statement: ast.stmt) -> list[ast.stmt]:
    """Return the innermost block around `statement`, in its function, that runs a backward pass; else its own block."""
    own = block = source.find_block(statement)
    while not any(_is_backward(node) for one in block for node in ast.walk(one)):
        outer = next(source.iterate_parents(block[0]), None)
        if not isinstance(outer, (ast.For, ast.While, ast.If, ast.With)):
            return own
        block = source.find_block(outer)
    return block


def _is_backward(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward"


def find_values(statement: ast.stmt, variable: str) -> Iterator[ast.expr]:
    """Yield the expressions that `statement` adds to the variable or attribute."""
    if isinstance(statement, ast.Expr) and isinstance(call := statement.value, ast.Call) and call.args:
        method = call.func if isinstance(call.func, ast.Attribute) else None
        if method and method.attr in _FILLING_METHODS and _find_variable(method.value) == variable:
            yield call.args[-1]
        elif method and method.attr in _IN_PLACE_METHODS and _find_variable(_find_changed(method.value)) == variable:
            yield call.args[0]
    elif isinstance(statement, ast.AugAssign) and _find_variable(statement.target) == variable:
        yield statement.value
    elif (parts := _split_assignment(statement, variable)) is not None:
        value, reads = parts
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add) and value.left in reads:
            yield value.right
        elif not reads and not _assigns_several(statement):
            yield value


def _find_changed(node: ast.expr) -> ast.expr:
    """Return the tensor that methods in place change: `a` of `a.mul_(0.9)`, which return it; `node` for others."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_"):
        node = node.func.value
    return node


def _find_earlier(statement: ast.stmt, variable: str) -> Iterator[ast.expr]:
    """Yield where `statement`, which computes the variable from its earlier value, and adds nothing, reads that."""
    parts = _split_assignment(statement, variable)
    if parts is not None and next(find_values(statement, variable), None) is None:
        tested = {part for node in ast.walk(parts[0]) if isinstance(node, ast.Compare) for part in ast.walk(node)}
        yield from (node for node in parts[1] if node not in tested)


def _split_assignment(statement: ast.stmt, variable: str) -> tuple[ast.expr, list[ast.expr]] | None:
    """Return what `statement` assigns to the variable or attribute, and where that reads it; None for others."""
    if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or statement.value is None:
        return None
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    targets = [part for one in targets for part in (one.elts if isinstance(one, ast.Tuple) else [one])]
    target = next((one for one in targets if _find_variable(one) == variable), None)
    if target is None:
        return None
    text, value = ast.unparse(target), statement.value
    return value, [node for node in ast.walk(value) if isinstance(node, ast.expr) and ast.unparse(node) == text]


def _assigns_several(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Tuple)


def _find_variable(node: ast.expr) -> str:
    """Return the name of the variable or attribute that an expression is, or is an item of; "" for others."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _list_uses(tree: ast.AST, variable: str) -> list[ast.expr]:
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.Name, ast.Attribute)) and _find_variable(node) == variable
    ]


def _list_readers(source: Source, use: ast.expr) -> list[ast.AST]:
    """Return the node that reads `use`, or an item of it; where a loop does, those that read the loop's variable."""
    node: ast.AST = use
    for parent in source.iterate_parents(use):
        if isinstance(parent, ast.Subscript) and parent.value is node:
            node = parent
            continue
        if isinstance(parent, (ast.For, ast.comprehension)) and parent.iter is node:
            items = {one.id for one in ast.walk(parent.target) if isinstance(one, ast.Name)}
            block = parent if isinstance(parent, ast.For) else next(source.iterate_parents(parent))
            names = (one for one in ast.walk(block) if isinstance(one, ast.Name) and one.id in items)
            return [next(source.iterate_parents(one)) for one in names]
        return [parent]
    return []


def _needs_tensor(reader: ast.AST) -> bool:
    """Return whether a value that `reader` reads has to be a tensor: one that has its methods, or is given to torch."""
    if isinstance(reader, ast.Call):
        return ast.unparse(reader.func).startswith(("torch.", "F."))
    return isinstance(reader, ast.Attribute) and reader.attr not in (*_FILLING_METHODS, "clear")


def _add_suffix(source: Source, value: ast.expr, suffix: str, container: str = "") -> Iterator[Change]:
    """Yield the changes that add `suffix` to `value`, or to the parts of a container that is written out, or that
    `value` is (`container`)."""
    if isinstance(value, (ast.List, ast.Tuple, ast.Set)):
        for part in value.elts:
            yield from _add_suffix(source, part, suffix, container)
    elif isinstance(value, ast.Dict):
        for part in value.values:
            yield from _add_suffix(source, part, suffix, container)
    elif isinstance(value, (ast.ListComp, ast.SetComp)):
        yield from _add_suffix(source, value.elt, suffix, container)
    elif isinstance(value, ast.DictComp):
        yield from _add_suffix(source, value.value, suffix, container)
    elif isinstance(value, ast.Call) and "state_dict()" in source.read(value):
        suffix = suffix.removeprefix(_SUFFIXES[EditKind.KEEP_DETACHED])  # a state dict has no graph
        yield Change(source.begin(value), source.begin(value), f"{{name: value{suffix} for name, value in ")
        yield Change(source.end(value), source.end(value), ".items()}")
    elif isinstance(value, ast.IfExp):
        yield from _add_suffix(source, value.body, suffix, container)
        yield from _add_suffix(source, value.orelse, suffix, container)
    elif not (
        isinstance(value, ast.Constant) or (isinstance(value, ast.Call) and _find_variable(value.func) in _NUMBERS)
    ):
        begin, end = source.begin(value), source.end(value)
        detached = _SUFFIXES[EditKind.KEEP_DETACHED]
        suffix = suffix.removeprefix(detached) if source.read(value).endswith(detached) else suffix
        if container:
            before, after = _PARTS[container]
            yield Change(begin, end, f"{before}{suffix}{after}".format(source.read(value)))
        elif isinstance(value, (ast.Name, ast.Attribute, ast.Subscript, ast.Call)):
            yield Change(end, end, suffix)
        else:
            yield Change(begin, begin, "(")
            yield Change(end, end, f"){suffix}")
