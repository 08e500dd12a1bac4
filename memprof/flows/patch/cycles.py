"""Edits that leave no reference cycle through autograd: `torch.autograd.grad`, and `ctx.save_for_backward`."""

from __future__ import annotations

import ast

from memprof.flows.patch.source import Change, NoPatchError, Source


def take_gradient(source: Source, line: int) -> list[Change]:
    """Return the changes that replace `y.backward(create_graph=True)` in `line` by a call of `torch.autograd.grad`, and
    the `.grad` that is read after it by the result.

    Raises NoPatchError: the call has other arguments, or it is not one tensor's `.grad` that is read.
    """
    source.check_name("torch")
    statement = next((one for one in source.list_statements(line) if isinstance(one, ast.Expr)), None)
    call = None if statement is None else statement.value
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr != "backward":
        raise NoPatchError(f"line {line} is no call of backward()")
    if call.args or [keyword.arg for keyword in call.keywords] != ["create_graph"]:
        raise NoPatchError("backward() has other arguments")
    reads = [
        node
        for node in ast.walk(source.find_scope(call))
        if isinstance(node, ast.Attribute) and node.attr == "grad" and source.begin(node) > source.end(call)
    ]
    names = {ast.unparse(node.value) for node in reads}
    if len(names) != 1 or not (name := names.pop()).isidentifier():
        raise NoPatchError("it is not the .grad of one variable that is read")
    result = f"{name}_grad"
    if result in source.text:
        raise NoPatchError(f"`{result}` is used already")
    new = f"{result} = torch.autograd.grad({source.read(call.func.value)}, {name}, create_graph=True)[0]"
    changes = [Change(source.begin(call), source.end(call), new)]
    return changes + [Change(source.begin(one), source.end(one), result) for one in reads]


def save_for_backward(source: Source, line: int, name: str) -> list[Change]:
    """Return the changes that give the attribute `name` of `ctx`, assigned in `line`, to `ctx.save_for_backward`.

    Raises NoPatchError: tensors are saved already, or the attribute is assigned elsewhere too.
    """
    statement = next((one for one in source.list_statements(line) if isinstance(one, ast.Assign)), None)
    target = None if statement is None else statement.targets[0]
    forward = None if statement is None else source.find_scope(statement)
    if statement is None or not isinstance(target, ast.Attribute) or not isinstance(forward, ast.FunctionDef):
        raise NoPatchError(f"line {line} does not assign to an attribute")
    function, context = next(source.iterate_parents(forward)), source.read(target.value)
    if "save_for_backward" in source.read(function) or len(statement.targets) > 1:
        raise NoPatchError("tensors are saved for the backward already")
    uses = [node for node in ast.walk(function) if isinstance(node, ast.Attribute) and node.attr == name]
    for use in uses:
        arguments = [one.arg for one in ast.walk(source.find_scope(use)) if isinstance(one, ast.arg)]
        if source.read(use.value) not in arguments[:1]:
            raise NoPatchError(f"line {use.lineno} has a `{name}` of another object")
    if [use for use in uses if not isinstance(use.ctx, ast.Load)] != [target]:
        raise NoPatchError(f"`{name}` is assigned in several places")
    value = source.read(statement.value)
    if not value.isidentifier():
        if any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(forward)):
            raise NoPatchError(f"`{name}` is a variable as well")
        value = name
    save = f"{context}.save_for_backward({value})"
    changes = []
    for use in (one for one in uses if one is not target):
        saved = value if source.find_scope(use) is forward else f"{source.read(use.value)}.saved_tensors[0]"
        changes.append(Change(source.begin(use), source.end(use), saved))
    if value != name or isinstance(statement.value, ast.Name):
        return [*changes, Change(source.begin(statement), source.end(statement), save)]
    return [*changes, Change(source.begin(target), source.end(target), name), source.insert_after(statement, save)]
