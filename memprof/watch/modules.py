"""Tracking of the running `nn.Module`, its path, and its role in the model (layer, embedding, head, ...).

`nn.Module.__call__` is wrapped during the run. Unlike global hooks, the wrapper also handles modules whose forward
raises, and keeps torch's fast path for modules without hooks.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any

import torch
from torch import nn

from memprof.trace.events import NONE, EventKind, Module, ModuleRole

_LIST_TYPES = (nn.ModuleList, nn.ModuleDict)  # containers that are not called; their members are


class _ThreadModules(threading.local):
    module = NONE  # The innermost module that the thread runs.
    # Module of the last outermost call; weak, so that the program can free the module after the call.
    root: weakref.ref[nn.Module] | None = None


class ModuleTracker:
    """Tracker of the innermost running module of each thread; has the table of all known modules."""

    def __init__(self) -> None:
        self.table: list[Module] = []
        # Path -> indices in the table, for the first `_num_indexed` rows.
        self._indices_by_path: dict[str, list[int]] = {}
        self._num_indexed = 0
        self.thread = _ThreadModules()  # Module that the current thread runs.
        self.on_enter_or_exit: Callable[[EventKind, int], None] = lambda kind, module: None
        self.on_first_inner_call: Callable[[int], None] = lambda module: None
        self._called_within: set[int] = set()  # modules that others have called
        self.on_root: Callable[[nn.Module], None] = lambda root: None
        # Called before an outermost module call (not from inside another module), with module, index, args, kwargs.
        self.on_outermost_call: Callable[[nn.Module, int, Any, Any], None] = lambda module, index, args, kwargs: None
        # Called with the result of such a call; not called if the module raises.
        self.on_outermost_return: Callable[[Any], None] = lambda result: None
        # Called with the error of such a call.
        self.on_outermost_raise: Callable[[BaseException], None] = lambda error: None
        self._index_by_module: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._module_by_parameter: dict[int, int] = {}

    @property
    def current_index(self) -> int:
        """Return the index of the innermost running module of this thread; NONE outside all modules."""
        return self.thread.module

    # Frames of the wrapper name the module that was running when an error was raised: see failure.py.
    def wrap_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the replacement for `nn.Module.__call__`."""
        tracker, thread_modules = self, self.thread

        def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            index = tracker._index_by_module.get(self)
            if index is None:
                index = tracker._register(self, args, kwargs)
            outer = thread_modules.module
            if outer == index:  # a compiler's wrapper calls the same module
                return original(self, *args, **kwargs)
            if outer == NONE:
                thread_modules.root = weakref.ref(self)
                tracker.on_outermost_call(self, index, args, kwargs)
            elif index not in tracker._called_within:
                tracker._called_within.add(index)
                tracker.on_first_inner_call(index)
            thread_modules.module = index
            tracker.on_enter_or_exit(EventKind.ENTER, index)
            try:
                result = original(self, *args, **kwargs)
            except BaseException as error:
                if outer == NONE:
                    tracker.on_outermost_raise(error)
                raise
            finally:
                thread_modules.module = outer
                tracker.on_enter_or_exit(EventKind.EXIT, index)
            if outer == NONE:
                tracker.on_outermost_return(result)
            return result

        return __call__

    def _get_root(self) -> nn.Module | None:
        return None if self.thread.root is None else self.thread.root()

    def get_index(self, module: nn.Module) -> int:
        """Return the index of `module`; NONE if it is not known."""
        return self._index_by_module.get(module, NONE)

    def find_parameter_module(self, parameter: torch.Tensor) -> int:
        """Return the index of the module that owns `parameter`; NONE if the module is not known."""
        return self._module_by_parameter.get(id(parameter), NONE)

    def find_innermost_module(self, index: int, path: str) -> int:
        """Return the index of the known module at the longest prefix of `path`, relative to the module `index`;
        `index` if there is none."""
        root = self.table[index].path if index != NONE else ""
        for index_in_table in range(self._num_indexed, len(self.table)):
            self._indices_by_path.setdefault(self.table[index_in_table].path, []).append(index_in_table)
        self._num_indexed = len(self.table)
        path_parts = path.split(".") if path else []
        candidate_paths = (".".join([root, *path_parts[:end]]).lstrip(".") for end in range(len(path_parts), 0, -1))
        # A model's modules stand in the table after it.
        indices = (
            index_in_table
            for end in candidate_paths
            for index_in_table in self._indices_by_path.get(end, ())
            if index_in_table >= index
        )
        return next(indices, index)

    def iterate_live_modules(self) -> Iterator[tuple[nn.Module, int]]:
        """Yield (module, index) for every module of the table that is still alive."""
        yield from self._index_by_module.items()

    def add_root(self, root: nn.Module) -> None:
        """Add the model `root` and all its submodules to the table, before the first call of `root`."""
        if root not in self._index_by_module:
            self._add_tree(root, reads_tokens=True)

    def _register(self, module: nn.Module, args: Any, kwargs: Any) -> int:
        if self.current_index == NONE:
            self._add_tree(module, reads_tokens=_has_token_ids(args, kwargs))
            self.on_root(module)
        elif isinstance(module, torch.fx.GraphModule) or type(module).__module__.startswith("torch._dynamo"):
            self._index_by_module[module] = self.current_index
        elif (root := self._get_root()) is not None and any(module is submodule for submodule in root.modules()):
            # The model was called while being built, to find the shape of its output.
            self._add_tree(root, reads_tokens=True)
            self.on_root(root)
        else:
            # Created during the forward, or not a child of its caller: named after the calling module.
            parent = self.table[self.current_index]
            path = f"{parent.path}.{type(module).__name__}".lstrip(".")
            self._add(module, path, ModuleRole.OTHER, parent.stack)
        return self._index_by_module[module]

    def _add(self, module: nn.Module, path: str, role: ModuleRole, stack: str) -> None:
        index = self._index_by_module[module] = len(self.table)
        self.table.append(
            Module(strip_compile_wrapper(path), type(module).__name__, role, strip_compile_wrapper(stack))
        )
        for parameter in module._parameters.values():
            if parameter is not None:
                self._module_by_parameter.setdefault(id(parameter), index)

    def _add_tree(self, root: nn.Module, *, reads_tokens: bool) -> None:
        stacks = dict(_find_stacks(root))
        reads_tokens = reads_tokens and any(isinstance(module, nn.Embedding) for module in root.modules())
        head = _find_head(root, stacks, reads_tokens=reads_tokens)
        layers = {path: stack for stack, modules in stacks.items() for path in _find_layer_paths(stack, modules)}
        # Path of each callable member of a bare list among the children -> path of the list.
        in_lists: dict[str, str] = {}
        wrapper_paths = {
            "",
            *_find_wrapped_paths(root),
            *(stack[:end] for stack in stacks for end in range(len(stack)) if stack[end] == "."),
        }
        # Submodules that were called alone before `root`, as a detector's are while it is built.
        called_before = {
            submodule
            for module in root.modules()
            if module is not root
            and module in self._index_by_module
            and self.table[self._index_by_module[module]].role is ModuleRole.ROOT
            for submodule in module.modules()
        }
        for path, module in root.named_modules():
            if module in self._index_by_module and module not in called_before:
                continue
            role = ModuleRole.OTHER
            if module is root:
                role = ModuleRole.ROOT
            elif module is head:
                role = ModuleRole.HEAD
            elif path in layers:
                role = ModuleRole.LAYER
            elif (
                path.rpartition(".")[0] in wrapper_paths and path not in wrapper_paths and not (stacks and reads_tokens)
            ):
                role = ModuleRole.CHILD
                if isinstance(module, _LIST_TYPES):
                    in_lists |= dict.fromkeys(_find_layer_paths(path, module), path)
            elif path in in_lists and not isinstance(module, nn.Embedding):
                role = ModuleRole.CHILD
            elif isinstance(module, nn.Embedding):
                role = ModuleRole.EMBEDDING
            elif "norm" in type(module).__name__.lower():
                role = ModuleRole.NORM
            stack = {ModuleRole.LAYER: layers, ModuleRole.CHILD: in_lists}.get(role, {}).get(path, "")
            self._add(module, path, role, stack)


def strip_compile_wrapper(path: str) -> str:
    """Return the module or parameter `path` without the `_orig_mod` that torch.compile inserts."""
    return ".".join(part for part in path.split(".") if part != "_orig_mod")


def _find_stacks(root: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, list) for the outermost lists of equal layers: a transformer's layers, a ResNet's blocks.

    A stack is a ModuleList or Sequential of several modules of one type, each with parameters.
    """
    for name, child in root.named_children():
        path = f"{prefix}{name}"
        members = list(child.children()) if isinstance(child, (nn.ModuleList, nn.Sequential)) else []
        has_one_type = len({type(member) for member in members}) == 1
        have_parameters = all(next(member.parameters(), None) is not None for member in members)
        # A Sequential of bare Linear layers is a network, not a stack of layers.
        is_layer_list = isinstance(child, nn.ModuleList) or (members and next(members[0].children(), None) is not None)
        if len(members) > 1 and has_one_type and have_parameters and is_layer_list:
            yield path, child
            continue
        yield from _find_stacks(child, f"{path}.")


def _find_wrapped_paths(root: nn.Module) -> Iterator[str]:
    """Yield the paths of the submodules that `root` only wraps: its single child (the `module` of DataParallel), that
    child's single child, and so on."""
    path = ""
    while len(children := list(root.named_children())) == 1 and next(children[0][1].children(), None) is not None:
        name, root = children[0]
        path = f"{path}.{name}".lstrip(".")
        yield path


def _has_token_ids(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the arguments have token ids: only integer tensors, or one with more than one dimension."""
    values = [*args, *kwargs.values()]
    values += [value for part in values if isinstance(part, Mapping) for value in part.values()]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    integer_tensors = [
        tensor for tensor in tensors if not tensor.dtype.is_floating_point and tensor.dtype != torch.bool
    ]
    return bool(integer_tensors) and (
        len(integer_tensors) == len(tensors) or any(tensor.dim() > 1 for tensor in integer_tensors)
    )


def _find_layer_paths(path: str, stack: nn.Module) -> Iterator[str]:
    """Yield the paths of the layers in `stack` (at `path`), including those in ModuleLists inside `stack`."""
    for name, member in stack.named_children():
        if isinstance(member, _LIST_TYPES):
            yield from _find_layer_paths(f"{path}.{name}", member)
        else:
            yield f"{path}.{name}"


def _find_head(root: nn.Module, stacks: dict[str, nn.Module], *, reads_tokens: bool) -> nn.Module | None:
    """Return the module that produces the logits: the model's `get_output_embeddings()`. Else, in a model that reads
    tokens, the last Linear outside `stacks` with an output per word, or the last Linear directly below `root` (a
    classifier). Else None."""
    getter = getattr(root, "get_output_embeddings", None)
    if callable(getter):
        try:
            head = getter()
        except (AttributeError, NotImplementedError):
            head = None
        if isinstance(head, nn.Module):
            return head
    if not reads_tokens:
        return None
    vocabulary_sizes = {module.num_embeddings for module in root.modules() if isinstance(module, nn.Embedding)}
    # A position table may have as many rows as the model's width: then the outputs of a pooler are not words.
    vocabulary_sizes -= {module.in_features for module in root.modules() if isinstance(module, nn.Linear)}
    head_by_is_vocabulary: dict[bool, nn.Module] = {}
    for path, module in root.named_modules():
        is_in_stack = any(path == stack or path.startswith(stack + ".") for stack in stacks)
        if (
            isinstance(module, nn.Linear)
            and not is_in_stack
            and (module.out_features in vocabulary_sizes or (stacks and "." not in path))
        ):
            head_by_is_vocabulary[module.out_features in vocabulary_sizes] = module
    return head_by_is_vocabulary.get(True, head_by_is_vocabulary.get(False))


# Code of the wrapped `nn.Module.__call__`; the local `index` of its frames is the module's.
MODULE_CALL_CODE: CodeType = next(
    constant
    for constant in ModuleTracker.wrap_call.__code__.co_consts
    if isinstance(constant, CodeType) and constant.co_name == "__call__"
)
