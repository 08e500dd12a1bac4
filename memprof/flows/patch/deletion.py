"""`del NAME` after the last use of a variable in the block that assigns to it, where nothing else can read it."""

from __future__ import annotations

import ast

from memprof.flows.patch.source import Change, NoPatchError, Source

_LOOPS = (ast.For, ast.AsyncFor, ast.While)


def delete_after_last_use(source: Source, line: int, name: str) -> list[Change]:
    """Return the change that deletes the variable `name` after its last use in the block that assigns to it at `line`.

    Raises NoPatchError: the variable is read in another block, in the next round of a loop, or in another function.
    """
    name = name.partition("[")[0]
    uses = _find_uses(source, line, name)
    bindings = _find_bindings(source, uses)
    if not bindings:
        raise NoPatchError(f"no statement assigns to `{name}`")
    binding = next((one for one in bindings if one.lineno == line), bindings[0])
    block = binding.body if isinstance(binding, ast.For) else source.find_block(binding)
    last = next((one for one in reversed(block) if not set(ast.walk(one)).isdisjoint(uses)), None)
    if last is None:
        raise NoPatchError(f"`{name}` is not used in its block")
    begin = source.begin(block[0]) if isinstance(binding, ast.For) else source.begin(binding)
    end = source.end(last)
    loops = [one for one in (binding, *source.iterate_parents(binding)) if isinstance(one, _LOOPS)]
    first_of_loop = source.begin(loops[-1]) if loops else begin
    for use in uses:
        position = source.begin(source.find_statement(use))
        is_other_value = position < first_of_loop or _reads_another(
            source, use, [one for one in bindings if source.begin(one) >= (end if position >= end else first_of_loop)]
        )
        if not begin <= position < end and _is_read(source, use) and not is_other_value:
            raise NoPatchError(f"`{name}` is read in line {use.lineno} too")
    return [source.insert_after(last, f"del {name}")]


def _find_uses(source: Source, line: int, name: str) -> list[ast.Name]:
    """Return where the variable is used. Raises NoPatchError: another function uses it, or it is deleted already."""
    shared = (ast.Global, ast.Nonlocal)
    if any(name in node.names for node in ast.walk(source.tree) if isinstance(node, shared)):
        raise NoPatchError(f"`{name}` is shared by functions")
    statement = next(iter(source.list_statements(line)), source.tree)
    is_function = isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef))
    scope = statement if is_function else source.find_scope(statement)
    if scope is source.tree and not source.is_script:
        raise NoPatchError(f"`{name}` is a module's, which other files may read")
    names = [node for node in ast.walk(scope) if isinstance(node, ast.Name) and node.id == name]
    for function in {source.find_scope(node) for node in names} - {scope}:
        own = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
        own |= {node.id for node in names if isinstance(node.ctx, ast.Store) and source.find_scope(node) is function}
        if name not in own:
            raise NoPatchError(f"`{name}` is read in a function")
    uses = [node for node in names if source.find_scope(node) is scope]
    if any(isinstance(use.ctx, ast.Del) for use in uses):
        raise NoPatchError(f"`{name}` is deleted already")
    return uses


def _find_bindings(source: Source, uses: list[ast.Name]) -> list[ast.stmt | ast.For]:
    """Return the statements that assign to the variable, without those that assign a constant, in their order."""
    found = []
    for use in (one for one in uses if isinstance(one.ctx, ast.Store)):
        statement = source.find_statement(use)
        targets: list[ast.expr] = []
        if isinstance(statement, ast.For):
            targets = [statement.target]
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)) and not isinstance(statement.value, ast.Constant):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        if any(use in ast.walk(target) for target in targets):
            found.append(statement)
    return sorted(found, key=source.begin)


def _is_read(source: Source, use: ast.Name) -> bool:
    return isinstance(use.ctx, ast.Load) or isinstance(source.find_statement(use), ast.AugAssign)


def _reads_another(source: Source, use: ast.Name, bindings: list[ast.stmt]) -> bool:
    """Return whether one of `bindings` has always assigned to the variable before `use`, in the same block."""
    statements = {one for one in source.iterate_parents(use) if isinstance(one, ast.stmt)}
    for binding in bindings:
        following = (
            binding.body
            if isinstance(binding, ast.For)
            else [one for one in source.find_block(binding) if source.begin(one) >= source.end(binding)]
        )
        if not statements.isdisjoint(following):
            return True
    return False
