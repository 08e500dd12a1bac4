"""In a process of memprof's own, torch's compiler is imported when something is compiled, and not before.

A third of what `memprof profile` would import is torch._dynamo, with sympy, Triton and the distributed packages in tow.
An eager run needs none of it, but it is asked for at these places:

* torch keeps Dynamo out of some of its functions (`_disable_dynamo` in torch/_compile.py), and transformers marks
  functions of its own for it (`torch.compiler.disable`, `torch._dynamo.allow_in_graph`). As long as Dynamo is not there
  nothing is compiled, and the functions do as they are; when it comes, it is told of those that were marked. A setting
  of it that checkpoint() notes is known.
* transformers/masking_utils.py takes a context manager from it, for masks that are made with vmap.
* operators in Python ask whether a size is a symbol: torch.fx.experimental.symbolic_shapes, which can be said of
  numbers and truth values without (`_PLAIN`; each says what the function of that name does with them); and whether a
  value is a `sympy.Basic`, which nothing can be before sympy is there; torch/utils/flop_counter.py asks the same of
  Triton's `JITFunction`.
* transformers takes functions and classes from accelerate and from torch's FSDP and distributed checkpoints, which it
  calls where a model is spread or loaded, and from the hub's client, where one is downloaded, as PEFT does (`_CALLED`).
* torch.distributed.tensor, whose classes transformers asks about, begins with the rules of all operators for tensors
  that are spread over a mesh of devices. They are run when the first mesh is made.
* inspect finds the module of a frame among the real paths of all that were imported, and torch asks for that for each
  of its primitive operators: the frame has it.
* torch._library makes two classes for each of torch's primitive operators, for gradients through it. Those of an
  operator are made when it is called.

Whoever asks for more gets the real modules, which are imported then. But what an import leaves behind may hold on to
the frames that it was called from, and to their tensors: `came_late` says that it was so, and the run is run again.
So nothing is postponed in a process of the user's, nor in one that runs a user's program.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import inspect
import operator
import sys
from collections.abc import Callable, Iterator
from importlib.abc import Loader, MetaPathFinder
from types import FrameType, FunctionType, ModuleType
from typing import Any

_DYNAMO, _SYMBOLS, _SYMPY = "torch._dynamo", "torch.fx.experimental.symbolic_shapes", "sympy"
_TRACED, _SIZES = _DYNAMO + "._trace_wrapped_higher_order_op", "torch.utils._sympy.functions"
_MARKS = ("disable", "allow_in_graph", "assume_constant_result")
"""What Dynamo is asked to note of a function, and what torch.compiler calls it too."""
_KEPT = "__dynamo_disable"
"""Where torch._compile keeps what `disable` returned for a function."""
_ASKING_DYNAMO = (
    ("torch._compile", "inner"),
    ("torch.optim.optimizer", "_use_grad"),
    ("torch.utils.checkpoint", "_checkpoint_without_reentrant_generator"),
    ("torch.utils.checkpoint", "__init__"),
)
"""Functions that ask it something when they are called, which can be said without."""
_OF_A_HOOK = {"disable": lambda fn: fn}
"""checkpoint()'s hooks go with what they recompute: Dynamo is told of none later, which would keep tensors."""
_PASSING_ON = (("importlib", "import_module"), ("torch", "__getattr__"), ("huggingface_hub", "__getattr__"))
_RULES, _MESHES, _GRADIENTS = (
    "torch.distributed.tensor._ops",
    "torch.distributed.device_mesh",
    "torch._library.autograd",
)
Lifted = Callable[[], contextlib.AbstractContextManager[None]]
_Instead = Callable[[ModuleType, Callable[[], None]], None]
"""What is done with a module in place of running it, which the second argument does."""
_inside: list[tuple[Lifted, Callable[[], bool]]] = []
_late: list[str] = []


def postpone(*, rules: bool = False) -> None:
    """From here on in this process, none of it is imported until it is needed.

    `rules` of torch.distributed.tensor too: not where a program of others may add its own to them.
    """
    if not {_DYNAMO, _SYMBOLS, _SYMPY} & sys.modules.keys() and not any(type(f) is _Finder for f in sys.meta_path):
        instead: dict[str, _Instead] = {_GRADIENTS: _made_when_called}
        if rules:
            instead[_RULES] = _run_for_a_mesh
        sys.meta_path.insert(0, _Finder(instead))
        inspect.getmodule = functools.wraps(inspect.getmodule)(functools.partial(_module_of, inspect.getmodule))


@contextlib.contextmanager
def imported_inside(lifted: Lifted, is_late: Callable[[], bool]) -> Iterator[None]:
    """What is needed inside after all is imported inside `lifted()`; if `is_late()`, `came_late` will say so."""
    _inside.append((lifted, is_late))
    try:
        yield
    finally:
        _inside.pop()


def came_late() -> bool:
    """Whether anything was imported since this was last asked that the run should have had from its begin."""
    late = bool(_late)
    _late.clear()
    return late


def _as_it_is(name: str) -> contextlib.AbstractContextManager[None]:
    if not _inside:
        return contextlib.nullcontext()
    _note_late(name)
    return _inside[-1][0]()


def _note_late(name: str) -> None:
    if name not in sys.modules:
        _note_run(name)


def _note_run(name: str) -> None:
    if _inside and _inside[-1][1]():
        _late.append(name)


def _asking() -> tuple[str, str]:
    """The module and the function that import something now."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        by = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if not frame.f_code.co_filename.startswith("<frozen importlib") and by not in _PASSING_ON:
            return by
        frame = frame.f_back
    return "", ""


def _is_answered(name: str, module: str, function: str) -> bool:
    """Whether `function` of `module` is answered without the module `name`."""
    if name in (_SYMPY, _SIZES):
        return module == "torch._prims_common" and function != "<module>"
    if name in _CALLED or name in _JIT:
        return function == "<module>" and module in (_CALLED | _JIT)[name]
    if (module, function) == ("transformers.masking_utils", "<module>"):
        return True
    if name != _DYNAMO:
        return False
    if module == "torch.compiler":
        return function in _MARKS
    if function == "<module>":
        return module.startswith("transformers.integrations.")
    return (module, function) in _ASKING_DYNAMO


class _Later:
    """A function or a class that is imported when it is called."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._real()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._real(), name)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._real())

    def __or__(self, other: object) -> Any:
        return Any  # in an annotation

    def _real(self) -> Any:
        _note_late(self._module)
        return getattr(importlib.import_module(self._module), self._name)


class _NotYet(type):
    """Of classes that have no instances before their module is there: theirs are those of the real one then."""

    module: str

    def __instancecheck__(cls, value: Any) -> bool:
        real = vars(sys.modules.get(cls.module, sys)).get(cls.__name__)
        return isinstance(real, type) and not isinstance(real, _NotYet) and isinstance(value, real)


class _Config:
    """torch._dynamo.config; what checkpoint() notes of it is for a recomputation that is traced, which is not yet."""

    error_on_nested_fx_trace = True

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(f"{_DYNAMO}.config"), name)


_JIT = dict.fromkeys(("triton", "triton.runtime", "triton.runtime.jit"), ("torch.utils.flop_counter",))
_LOADING = tuple(
    f"transformers.{name}"
    for name in (
        "integrations.accelerate", "integrations.peft", "modeling_utils", "generation.utils",
        "loss.loss_for_object_detection", "loss.loss_rt_detr", "loss.loss_grounding_dino",
    )
)  # fmt: skip
_DOWNLOADING = (
    "transformers.utils.hub", "transformers.safetensors_conversion",
    "peft.peft_model", "peft.utils.loftq_utils", "peft.utils.other", "peft.utils.save_and_load",
)  # fmt: skip
_CALLED = {
    **dict.fromkeys(("accelerate", "accelerate.utils", "accelerate.utils.modeling", "accelerate.hooks"), _LOADING),
    "torch.distributed._composable": ("transformers.distributed.fsdp",),
    "torch.distributed._composable.fsdp": ("transformers.distributed.fsdp",),
    "torch.distributed.fsdp": ("transformers.distributed.fsdp",),
    "torch.distributed.checkpoint": ("transformers.distributed.checkpoint",),
    "torch.distributed.checkpoint.hf_storage": ("transformers.distributed.checkpoint",),
    **{
        f"huggingface_hub.{name}": _DOWNLOADING
        for name in ("hf_api", "community", "repocard", "repocard_data", "_snapshot_download", "hf_file_system")
    },
}
"""Modules of which somebody, when it is imported, takes what it will call or what values are instances of, and who."""
_ANSWERED: dict[str, dict[str, Any]] = {
    _TRACED: {"TransformGetItemToIndex": _Later(_TRACED, "TransformGetItemToIndex")},
    _DYNAMO: {"graph_break": lambda *args, **kwargs: None, "config": _Config()},
    _SIZES: {"Max": _Later(_SIZES, "Max")},
    _SYMPY: {"Basic": _NotYet("Basic", (), {"module": _SYMPY})},
    **{name: {} for name in (*_JIT, *_CALLED)},
    "triton.runtime.jit": {"JITFunction": _NotYet("JITFunction", (), {"module": "triton.runtime.jit"})},
}
"""Modules that are answered without, and what."""
_PACKAGES = {name.rpartition(".")[0] for name in _ANSWERED} & _ANSWERED.keys() | {"torch.distributed.fsdp"}


class _Answers(ModuleType):
    """A module for one who asks it for one name; when that was asked for, it is gone from the others' sight."""

    def __init__(self, name: str, answers: dict[str, Any]) -> None:
        super().__init__(name)
        vars(self)["_answers"] = answers

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        for known in [known for known in _ANSWERED if isinstance(sys.modules.get(known), _Answers)]:
            parent, _, own = known.rpartition(".")
            if parent in sys.modules:
                vars(sys.modules[parent]).pop(own, None)
            del sys.modules[known]
        if name in self._answers:
            return self._answers[name]
        if self.__name__ in _CALLED:
            return _Later(self.__name__, name)
        return getattr(importlib.import_module(self.__name__), name)


class _Finder(MetaPathFinder, Loader):
    """Finds these modules: for those who are answered without them what answers, for others the real ones."""

    def __init__(self, instead: dict[str, _Instead]) -> None:
        self._instead = instead
        self._marks = {name: functools.partial(self._mark, name) for name in _MARKS}
        self._kept_out: list[Any] = []
        """Functions that torch._compile calls as they are."""
        self._marked: list[Callable[[ModuleType], None]] = []
        self._symbols: _Symbols | None = None
        self._is_there = False
        self._asker = "", ""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """As the import system asks."""
        if name == _SYMBOLS and self._symbols is None:
            return importlib.machinery.ModuleSpec(name, self)
        if name in self._instead and (name != _RULES or not self._is_there):
            return self._run_by(self._instead.pop(name), name)
        if name not in _ANSWERED or self._is_there:
            return None
        self._asker = _asking()
        if _is_answered(name, *self._asker):
            return importlib.machinery.ModuleSpec(name, self, is_package=name in _PACKAGES)
        return self._real() if name == _DYNAMO else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """What answers in its place."""
        if spec.name == _SYMBOLS:
            self._symbols = _Symbols()
            return self._symbols
        marks = (self._marks if self._asker[1] != "__init__" else _OF_A_HOOK) if spec.name == _DYNAMO else {}
        return _Answers(spec.name, _ANSWERED[spec.name] | marks)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is run."""

    def _run_by(self, instead: _Instead, name: str) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: instead(module, lambda: run(module))  # type: ignore[method-assign]
        return spec

    def _real(self) -> importlib.machinery.ModuleSpec | None:
        self._is_there = True
        spec = importlib.util.find_spec(_DYNAMO)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            while self._kept_out:  # torch asks again
                vars(self._kept_out.pop()).pop(_KEPT, None)
            with _as_it_is(_DYNAMO):
                run(module)
            while self._marked:
                self._marked.pop()(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _mark(self, mark: str, fn: Any = None, *args: Any, **options: Any) -> Any:
        if fn is None:
            return lambda fn: self._mark(mark, fn, *args, **options)
        if mark == "disable" and options.get("wrapping") is False and isinstance(fn, FunctionType):  # torch._compile
            self._kept_out.append(fn)
            return fn
        if not isinstance(fn, FunctionType):
            return getattr(importlib.import_module(_DYNAMO), mark)(fn, *args, **options)
        function = fn

        @functools.wraps(fn)
        def disabled(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        def tell(dynamo: Any) -> None:
            nonlocal function
            function = getattr(dynamo, mark)(fn, *args, **options)

        self._marked.append(tell)
        return disabled if mark == "disable" else fn


def _module_of(find: Callable[..., ModuleType | None], thing: Any, _filename: str | None = None) -> ModuleType | None:
    """As inspect.getmodule, which `find` is."""
    if isinstance(thing, FrameType):
        module = sys.modules.get(thing.f_globals.get("__name__", ""))
        if module is not None and getattr(module, "__file__", None) == thing.f_code.co_filename:
            return module
    return find(thing, _filename)


def _run_for_a_mesh(module: ModuleType, run: Callable[[], None]) -> None:
    """Run torch.distributed.tensor._ops when the first mesh of devices is made, without which no tensor is spread."""
    meshes = importlib.import_module(_MESHES).DeviceMesh
    plain = meshes.__init__

    @functools.wraps(plain)
    def __init__(mesh: Any, *args: Any, **kwargs: Any) -> None:
        if meshes.__init__ is __init__:
            meshes.__init__ = plain
            _note_run(module.__name__)
            with _as_it_is(module.__name__):
                run()
        plain(mesh, *args, **kwargs)

    meshes.__init__ = __init__


def _made_when_called(module: ModuleType, run: Callable[[], None]) -> None:
    """torch._library.autograd, whose kernels for gradients make themselves when they are first called."""
    run()
    make = getattr(module, "make_autograd_impl", None)
    if make is None:
        return

    @functools.wraps(make)
    def make_autograd_impl(*operator: Any) -> Callable[..., Any]:
        made: list[Callable[..., Any]] = []

        def autograd_impl(*args: Any, **kwargs: Any) -> Any:
            if not made:
                made.append(make(*operator))
            return made[0](*args, **kwargs)

        return autograd_impl

    vars(module)["make_autograd_impl"] = make_autograd_impl


# -- torch.fx.experimental.symbolic_shapes -------------------------------------------------------------------------


def _alike(x: Any, y: Any) -> bool:
    if isinstance(x, tuple | list):
        return len(x) == len(y) and all(map(_alike, x, y))
    return bool(x == y)


def _are(kind: type, values: tuple[Any, ...]) -> bool:
    return bool(values) and all(type(value) is kind for value in values)


def _are_sizes(value: Any) -> bool:
    return type(value) is int or (isinstance(value, tuple | list) and all(type(each) is int for each in value))


def _has_plain_sizes(tensor: Any) -> bool:
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False
    return _are_sizes(tensor.shape) and _are_sizes(tensor.stride()) and type(tensor.storage_offset()) is int


_PLAIN: dict[str, tuple[Callable[..., bool], Callable[..., Any]]] = {
    **dict.fromkeys(
        ("guard_or_false", "guard_or_true", "statically_known_true", "guard_size_oblivious"),
        (lambda value: type(value) is bool, lambda value: value),
    ),
    "expect_true": (lambda value, skip=0: type(value) is bool, lambda value, skip=0: value),
    "guard_int": (lambda value: type(value) is int, lambda value: value),
    "guarding_hint_or_throw": (lambda value: type(value) in (bool, int), lambda value: value),
    "has_guarding_hint": (lambda value: type(value) in (bool, int, float), lambda value: True),
    "is_nested_int": (lambda value: type(value) in (bool, int, float), lambda value: False),
    "sym_and": (lambda *values: _are(bool, values), lambda *values: functools.reduce(operator.and_, values)),
    "sym_or": (lambda *values: _are(bool, values), lambda *values: functools.reduce(operator.or_, values)),
    "sym_eq": (lambda x, y: _are_sizes(x) and _are_sizes(y) and isinstance(x, int) == isinstance(y, int), _alike),
    "free_unbacked_symbols": (_has_plain_sizes, lambda tensor: set()),
}
"""Function -> whether it is asked of no symbol, and what it returns then (torch/fx/experimental/symbolic_shapes.py)."""
_RAISED = ("GuardOnDataDependentSymNode",)
"""Errors that only the real module raises: to be caught, another class does until it is there."""


class _Symbols(ModuleType):
    """The module until something is asked of it that needs the real one."""

    def __init__(self) -> None:
        super().__init__(_SYMBOLS)
        vars(self)["_to_catch"] = []
        for name, (is_plain, answer) in _PLAIN.items():
            vars(self)[name] = self._either(name, is_plain, answer)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        frame = sys._getframe(1)
        if name in _RAISED and frame.f_code.co_name == "<module>" and sys.modules.get(_SYMBOLS) is self:
            self._to_catch.append((frame.f_globals, name))
            return type(name, (Exception,), {})
        return getattr(self._real(), name)

    def _either(self, name: str, is_plain: Callable[..., bool], answer: Callable[..., Any]) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            if is_plain(*args, **kwargs):
                return answer(*args, **kwargs)
            return getattr(self._real(), name)(*args, **kwargs)

        function.__name__ = function.__qualname__ = name
        return function

    def _real(self) -> ModuleType:
        if sys.modules.get(_SYMBOLS) is self:
            del sys.modules[_SYMBOLS]
        with _as_it_is(_SYMBOLS) if _SYMBOLS not in sys.modules else contextlib.nullcontext():
            real = importlib.import_module(_SYMBOLS)
        while self._to_catch:
            names, name = self._to_catch.pop()
            names[name] = getattr(real, name)
        return real
