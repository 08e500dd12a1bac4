"""The compiler of a run: what `torch.compile` is in it, and what runs eagerly all the same.

Dynamo, AOTAutograd and Inductor are imported when the program first compiles something, and see torch as it is without
memprof (mode_suspension.py) but for what stands for the GPU (`_gpu_patches`, tracing.py). What they make runs in the
run as the program's own code does.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib.util
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from memprof.patching import Extension, Patch, PatchSet
from memprof.torch_private import cuda, dynamo, inductor
from memprof.virtual.compiled.diagnostics import CompileDiagnostics
from memprof.virtual.compiled.graphs import Graphs
from memprof.virtual.compiled.mode_suspension import Lifting
from memprof.virtual.compiled.origins import Origins
from memprof.virtual.cuda_api.driver import driver_patches, returning
from memprof.virtual.gpus import Gpus
from memprof.virtual.install_context import InstallContext
from memprof.virtual.integrations.compiled import BLOCK_MASK, allocate_block_mask, is_block_mask
from memprof.watch.program_code import GENERATED_CODE_FOLDERS, is_program

COMPILED = (
    "torch.compile compiles for the GPU, down to the code around its kernels, which allocates as it does there; "
    "kernels are neither made nor run, and what they would write is not known."
)
EAGER = "torch.compile runs eagerly here{}: compiled code fuses operators and as a rule needs less."
_BY_TIME = "Inductor is not asked to time kernels against each other ({}): cuBLAS and its own first choice are taken."
_TIMED = ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise", "coordinate_descent_tuning")
# Settings of Inductor while it compiles: nothing is kept for other processes, or timed.
_INDUCTOR = {
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "autotune_local_cache": False,
    "compile_threads": 1,
    "triton.cudagraphs": False,
    "triton.autotune_at_compile_time": False,
    **dict.fromkeys(_TIMED, False),
}
_DYNAMO = {"run_gc_after_compile": False}  # all garbage is looked for once it has compiled, and not a part of it before
_AOT = {
    "enable_autograd_cache": False,
    "enable_remote_autograd_cache": False,
    "force_non_lazy_backward_lowering": True,  # what cannot be compiled is known before the forward has run
}
# Packages of memprof that the program passes through without knowing; models and fixes are compiled as its own.
_OWN = ("virtual", "stubs", "watch", "patching", "torch_private")
_OWN_FOLDERS = tuple(f"{__file__.rsplit('/', 3)[0]}/{name}" for name in _OWN)
_CACHE = "TORCHINDUCTOR_CACHE_DIR"


class Compiler(Extension):
    """`torch.compile` of one run: its parts, of which each patches another place of torch, and what it compiles now."""

    def __init__(self) -> None:
        self._own = PatchSet()
        self._stack = contextlib.ExitStack()
        self._is_installed = False
        self._frame = "a function"
        self._folder = ""
        self._drivers: list[Patch] = []
        self._graphs_for_all = False

    def _begin(self, context: InstallContext) -> None:
        self._machine, self._function_mode = context.tracker, context.function_mode
        self._patches, self._assume = context.run_patches, context.assume
        self._why_not = "" if context.options.compiles else ", as requested"
        if context.options.compiles and "triton" not in sys.modules and importlib.util.find_spec("triton") is None:
            self._why_not = ", for Triton is not installed"
        self._lifted = Lifting(self._patches, (self._machine, self._function_mode), self._compiling)
        self._origins = Origins(context.recorder, lambda: self._folder)
        self._graphs = Graphs(context.recorder, self._assume)
        self._diagnostics = CompileDiagnostics(self._lifted, context.recorder, self._assume)

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Replace `torch.compile`; `nn.Module.compile` calls it."""
        self._begin(context)
        original = torch.compile

        def compile_(model: Any = None, **options: Any) -> Any:
            known = _FUSED.get(getattr(model, "__name__", ""))
            if known and model.__module__.partition(".")[0] == "torchao":
                self._assume(known)
                return lambda *args, **kwargs: None
            if options.get("disable"):
                return original(model, **options)
            if is_block_mask(model):
                self._assume(BLOCK_MASK)
                return allocate_block_mask
            if not self._why_not:
                self.install()
            backend = options.get("backend")
            why_not = self._why_not or (f" (backend {backend})" if backend == "cudagraphs" else "")
            if why_not:
                self._assume(EAGER.format(why_not))
                return (lambda function: function) if model is None else model
            self._assume(COMPILED)
            if options.get("fullgraph") and isinstance(model, torch.nn.Module):
                # What Dynamo is to trace as one is the module's own call, and not the one that is watched.
                with self._patches.suspended():
                    return original(model, **options)
            return original(model, **options)

        yield torch, "compile", compile_

    @contextlib.contextmanager
    def around(self, context: InstallContext) -> Iterator[None]:
        """Have compiled for the GPU what was compiled before; leave nothing of that afterwards."""
        with contextlib.ExitStack() as stack:
            if dynamo.catch_errors.is_imported():
                if not self._why_not:
                    self._attempt(self._watch_frames)
                if self._why_not:
                    stack.enter_context(torch.compiler.set_stance("force_eager"))
            try:
                yield
            finally:
                self._own.undo()
                self._stack.close()

    def leave_in_child(self) -> None:
        """Take the compiler's own patches back: its files are the parent's."""
        self._own.undo()
        self._stack.pop_all()

    # -- installed when something is compiled -----------------------------------------------------------------------

    def install(self) -> None:
        """Import the compiler, and put what it runs in in place."""
        if not self._is_installed:
            self._is_installed = True
            self._attempt(self._prepare)

    def _attempt(self, prepare: Callable[[], None]) -> None:
        """Prepare for compiling; what torch or this machine lacks for it is why nothing is compiled."""
        try:
            prepare()
        except (ImportError, AttributeError) as error:
            # Releases of torch differ in what is private, and some are built without a compiler.
            self._own.undo()
            self._why_not = f", for torch {torch.__version__} is not prepared for it ({error})"
        except OSError as error:
            self._own.undo()
            self._why_not = f", for there is no folder to write its code in ({error})"

    def _prepare(self) -> None:
        with self._patches.suspended():
            for needed in (dynamo.functorch_config, inductor.compile_fx):
                needed.get()  # imports it
            # Tables of torch's functions, made when they are first requested, and kept for good.
            dynamo.get_torch_obj_rule_map()
            if dynamo.get_handlers.exists():
                dynamo.get_handlers()
        from memprof.virtual.compiled import program_side, saved, tracing, wrapper

        self._properties = torch.cuda.get_device_properties(0)
        self._drivers = list(driver_patches(self._machine.gpus))
        self._choices = tracing.Choices(self._machine)
        self._watch_frames()
        self._own.set_all(self._hooks())
        self._own.set_all(self._diagnostics.patches())
        self._own.set_all(saved.patches(self._diagnostics.keeps_more))
        self._own.set_all(program_side.patches(self._lifted, self._function_mode, self._assume))
        self._own.set_all(wrapper.patches(self._machine, self._origins, self._diagnostics.note_kernel))
        wrapper.add_rules(type(self._machine))
        with self._lifted():
            pass  # what a release lacks is missed here, and not when the program runs
        self._folder = tempfile.mkdtemp(prefix="memprof-inductor-")
        self._stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
        GENERATED_CODE_FOLDERS.append(self._folder)
        self._stack.callback(GENERATED_CODE_FOLDERS.remove, self._folder)
        self._stack.callback(_set_cache, os.environ.get(_CACHE))
        _set_cache(self._folder)
        self._stack.callback(self._forget, list(dynamo.SKIP_DIRS.get()))
        for name in _OWN:
            dynamo.skip_module(f"memprof.{name}")
        self._stack.enter_context(program_side.constants(type(self._properties)))

    def _forget(self, skipped: list[str]) -> None:
        dynamo.SKIP_DIRS.get()[:] = skipped
        dynamo.recompile_re()
        with self._patches.suspended():
            dynamo.reset()

    def _watch_frames(self) -> None:
        """Dynamo is entered without memprof's modes, which it would not compile under."""
        call, skipped = dynamo.catch_errors.get(), dynamo.ConvertFrameReturn.get()
        if "memprof" in call.__module__:
            return
        counters = dynamo.counters.get()

        def compile_frame(self_: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
            asked_by_memprof = sys._getframe(1).f_code.co_filename.startswith(_OWN_FOLDERS)
            if asked_by_memprof and not is_program(frame.f_code):
                return skipped()
            self.install()
            outer, code = self._frame, frame.f_code
            self._frame = f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"
            begun, is_left = counters["frames"]["total"], False
            try:
                with self._timed(), self._lifted():
                    made = call(self_, frame, *args, **kwargs)
                is_left = made.guarded_code is None and counters["frames"]["total"] == begun  # not traced
                if made.frame_exec_strategy.cur_action.name == "RUN_ONLY":
                    self._diagnostics.note_recompile_limit(self._frame)
                return made
            except dynamo.InternalTorchDynamoError.get() as error:
                self._fall_back(error)
                return skipped()
            finally:
                self._frame = outer
                if self._lifted.is_active and not is_left:
                    gc.collect()  # Python's collector does it while torch compiles: what it traced with ends in cycles

        self._own.set(*dynamo.catch_errors.patch(compile_frame))

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """Inside, torch compiles, which is noted once however deep the calls are nested."""
        is_outer, began = self._lifted.is_active, time.perf_counter()
        try:
            yield
        finally:
            if is_outer:
                self._diagnostics.add_compile_time(time.perf_counter() - began)

    def _fall_back(self, error: BaseException) -> None:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        kind = type(error).__name__
        self._assume(f"{self._frame} is not compiled here and runs eagerly: {reason[:200] or kind}.")

    def _hooks(self) -> Iterator[Patch]:
        lifted, made = self._lifted, self._choices.made
        build = dynamo.build_guards.get()
        whole, inner = inductor.compile_fx.get(), inductor.compile_fx_inner.get()

        def build_guards(manager: Any, code: Any, output_graph: Any = None, *args: Any, **kwargs: Any) -> None:
            # They are checked where the program runs, in what it sees of torch.
            with lifted.put_back():
                build(manager, code, output_graph, *args, **kwargs)

        def with_choices(function: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                with made():
                    return function(*args, **kwargs)

            return run

        def compile_inner(graph: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            with self._timed(), lifted():
                return inner(graph, inputs, *args, **kwargs)

        def compile_graphed(graph: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            compiled = compile_inner(graph, inputs, *args, **kwargs)
            self._graphs.keep(compiled, kwargs, self._frame)
            return compiled

        def compile_whole(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if "inner_compile" in kwargs:  # of itself, with the settings that it was given
                return whole(model, inputs, *args, **kwargs)
            if not _is_on_gpu(model, inputs):
                return model
            asked, graphed = self._settings(kwargs.get("config_patches"))
            kwargs["config_patches"] = asked
            compile_it = compile_graphed if graphed else compile_inner
            kept = torch.fx.GraphModule(model, copy.deepcopy(model.graph))  # what compiles it may change it
            try:
                with lifted():
                    return whole(model, inputs, *(args or (compile_it,)), **kwargs)
            except Exception as error:  # of any kind: what Inductor cannot do without a GPU runs eagerly
                self._fall_back(error)
                return kept

        yield dynamo.build_guards.patch(build_guards)
        yield dynamo.guard_on_torch_function_state.patch(lambda builder, guard: None)
        for name in (dynamo.run_node, dynamo.call_user_compiler):
            yield name.patch(with_choices(name.get()))
        yield inductor.compile_fx.patch(compile_whole)
        to_module = inductor.compile_to_module.get()

        def compile_to_module(lowered: Any) -> Any:
            module = to_module(lowered)
            self._origins.note(lowered, str(module.__file__))
            return module

        yield inductor.compile_to_module.patch(compile_to_module)

    def _settings(self, asked: dict[str, Any] | None) -> tuple[dict[str, Any], bool]:
        """The program's own settings of Inductor without those that need a GPU; whether it asks for CUDA graphs."""
        asked = dict(asked or {})
        timed = [name for name in _TIMED if asked.pop(name, False)]
        if timed:
            self._assume(_BY_TIME.format(", ".join(timed)))
        return asked, asked.pop("triton.cudagraphs", self._graphs_for_all)

    @contextlib.contextmanager
    def _compiling(self) -> Iterator[None]:
        from memprof.virtual.compiled import convolutions, tracing

        of_dynamo, of_aot = dynamo.config.get(), dynamo.functorch_config.get()
        of_inductor = inductor.config.get()
        self._graphs_for_all = bool(of_inductor.triton.cudagraphs)
        timed = [name for name in _TIMED if getattr(of_inductor, name, False)]
        if timed:
            self._assume(_BY_TIME.format(", ".join(timed)))
        own = PatchSet()
        _forget_triton()
        try:
            own.set_all(tracing.patches(self._machine))
            own.set_all(convolutions.patches(self._machine.gpu))
            own.set_all(_gpu_patches(self._machine.gpus, self._properties, self._drivers))
            with (
                of_dynamo.patch(_known(of_dynamo, _DYNAMO)),
                of_inductor.patch(_known(of_inductor, _INDUCTOR)),
                of_aot.patch(_known(of_aot, _AOT)),
                warnings.catch_warnings(),
            ):
                # Dynamo asks results of layers for it; that is nobody's mistake.
                warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
                yield
        finally:
            own.undo(but_below=self._folder)  # what was generated runs on, with what stands for the driver
            _forget_triton()


def _gpu_patches(gpus: Gpus, properties: Any, drivers: list[Patch]) -> Iterator[Patch]:
    """Yield what Dynamo and Inductor ask of the GPU, answered below `torch.cuda`, whose own functions stay."""
    # Streams of an accelerator are requested wherever there is one.
    yield from (patch for patch in drivers if patch[1].startswith("_cuda") or patch[1] == "default_generators")
    # torch built for CUDA would ask a driver that is not there which of its devices is current.
    yield cuda.accelerator_get_accelerator.patch(returning(None))
    for name in (cuda.exchange_device_of_torch, cuda.maybe_exchange_device_of_torch):
        yield name.patch(lambda device: gpus.select(device))
    for name in (dynamo.cuda_exchange_device, dynamo.cuda_maybe_exchange_device):
        yield name.patch(staticmethod(gpus.select))
    yield cuda.is_compiled.patch(returning(True))
    yield cuda.initialized.patch(True)
    yield cuda.cached_device_count.patch(gpus.number)
    yield cuda.get_device_properties.patch(returning(properties))
    yield dynamo.get_cuda_stream.patch(returning(0))
    yield dynamo.caching_worker_device_properties.patch({"cuda": [properties] * gpus.number})
    yield dynamo.caching_worker_current_devices.patch({})
    yield dynamo.cuda_get_raw_stream.patch(staticmethod(returning(0)))
    yield inductor.triton_hash_with_backend.patch(returning("memprof"))
    triton = sys.modules.get("triton.runtime.driver")
    if triton is not None:
        # Asked for the target of the program's own kernels, whose first form says which arguments they write.
        kind: Any = importlib.import_module("triton.backends.compiler")
        target = kind.GPUTarget("cuda", 10 * properties.major + properties.minor, properties.warp_size)
        yield triton.driver, "_active", SimpleNamespace(get_current_target=returning(target))


def _forget_triton() -> None:
    """Let torch see anew what Triton can do: it keeps the answer for good, and here the GPU is there for a while."""
    for function in vars(inductor.triton.get()).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


def _set_cache(folder: str | None) -> None:
    if folder is None:
        os.environ.pop(_CACHE, None)
    else:
        os.environ[_CACHE] = folder


def _known(module: Any, settings: dict[str, Any]) -> dict[str, Any]:
    names = set(module.get_config_copy()) if hasattr(module, "get_config_copy") else set(module._config)
    return {name: value for name, value in settings.items() if name in names}


def _is_on_gpu(model: Any, inputs: Any) -> bool:
    """Return whether anything of a graph is on the GPU: the rest of the host's work is run for its results."""
    values = [*inputs, *(node.meta.get("example_value") for node in model.graph.nodes)]
    return any(isinstance(value, torch.Tensor) and value.device.type == "cuda" for value in values)


# Functions of torchao (torchao/optim/adam.py) that only write into their arguments, and are always compiled. Inductor
# makes one kernel of this one: all else is elementwise around two maxima over a block of state. Tracing it for each
# parameter's shape would take longer than the rest of a run.
_FUSED = {
    "single_param_adam": (
        "torchao's optimizers update each parameter in one compiled kernel: nothing is allocated beside their state."
    )
}
