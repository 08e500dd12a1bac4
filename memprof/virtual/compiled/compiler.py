"""Replacement of `torch.compile` on the virtual GPU, and the cases that run eagerly.

Dynamo, AOTAutograd and Inductor are imported when the program first compiles a function. While they compile, memprof's
patches and modes are suspended (mode_suspension.py), except for the patches that simulate the GPU (`_gpu_patches`,
tracing.py). Generated code runs like the program's code.
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
from memprof.virtual.compiled.cuda_graphs import CudaGraphs
from memprof.virtual.compiled.diagnostics import CompileDiagnostics
from memprof.virtual.compiled.mode_suspension import Suspension
from memprof.virtual.compiled.origins import BufferOrigins
from memprof.virtual.cuda_api.driver import patch_driver
from memprof.virtual.gpu_functions import make_constant_function
from memprof.virtual.gpus import Gpus
from memprof.virtual.install_context import InstallContext
from memprof.virtual.integrations.compiled import BLOCK_MASK, allocate_block_mask, is_block_mask
from memprof.watch.program_code import GENERATED_CODE_FOLDERS, is_program

_COMPILATION_ASSUMPTION = (
    "torch.compile compiles for the GPU, down to the code around its kernels, which allocates as it does there; "
    "kernels are neither made nor run, and what they would write is not known."
)
_EAGER_ASSUMPTION = "torch.compile runs eagerly here{}: compiled code fuses operators and as a rule needs less."
_NO_TIMING_ASSUMPTION = (
    "Inductor is not asked to time kernels against each other ({}): cuBLAS and its own first choice are taken."
)
_TIMING_OPTIONS = ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise", "coordinate_descent_tuning")
# Settings of Inductor during compilation: no caches for other processes, no timing.
_INDUCTOR_SETTINGS = {
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "autotune_local_cache": False,
    "compile_threads": 1,
    "triton.cudagraphs": False,
    "triton.autotune_at_compile_time": False,
    **dict.fromkeys(_TIMING_OPTIONS, False),
}
_DYNAMO_SETTINGS = {"run_gc_after_compile": False}  # memprof runs a full collection after compilation
_AOT_SETTINGS = {
    "enable_autograd_cache": False,
    "enable_remote_autograd_cache": False,
    "force_non_lazy_backward_lowering": True,  # errors of the backward appear before the forward runs
}
# Packages of memprof that Dynamo skips; memprof's models and fixes are compiled like the program's code.
_SKIPPED_PACKAGES = ("virtual", "stubs", "watch", "patching", "torch_private")
_SKIPPED_FOLDERS = tuple(f"{__file__.rsplit('/', 3)[0]}/{name}" for name in _SKIPPED_PACKAGES)
_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_KEPT_NAMES = ("default_generators", "graph_pool_handle")  # of `torch.cuda`, that keep their patches


class Compiler(Extension):
    """Extension that replaces `torch.compile`, patches torch's compiler and holds the state of compilation."""

    def __init__(self) -> None:
        self._compiler_patches = PatchSet()
        self._exit_stack = contextlib.ExitStack()
        self._is_installed = False
        self._function_name = "a function"
        self._folder = ""
        self._driver_patches: list[Patch] = []
        self._uses_cuda_graphs = False

    def _initialize(self, context: InstallContext) -> None:
        self._device_state, self._function_mode = context.dispatch_mode, context.function_mode
        self._patches, self._assume = context.run_patches, context.assume
        self._reason_not_to_compile = "" if context.options.compiles else ", as requested"
        if context.options.compiles and "triton" not in sys.modules and importlib.util.find_spec("triton") is None:
            self._reason_not_to_compile = ", for Triton is not installed"
        self._suspension = Suspension(
            self._patches, (self._device_state, self._function_mode), self._prepare_compilation
        )
        self._origins = BufferOrigins(context.recorder, lambda: self._folder)
        self._graphs = CudaGraphs(context.recorder, self._assume)
        self._diagnostics = CompileDiagnostics(self._suspension, context.recorder, self._assume)

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Yield the replacement of `torch.compile`, which `nn.Module.compile` also calls."""
        self._initialize(context)
        original = torch.compile

        def compile_(model: Any = None, **options: Any) -> Any:
            assumption = _FUSED_FUNCTION_ASSUMPTIONS.get(getattr(model, "__name__", ""))
            if assumption and model.__module__.partition(".")[0] == "torchao":
                self._assume(assumption)
                return lambda *args, **kwargs: None
            if options.get("disable"):
                return original(model, **options)
            if is_block_mask(model):
                self._assume(BLOCK_MASK)
                return allocate_block_mask
            if not self._reason_not_to_compile:
                self.install()
            backend = options.get("backend")
            reason = self._reason_not_to_compile or (f" (backend {backend})" if backend == "cudagraphs" else "")
            if reason:
                self._assume(_EAGER_ASSUMPTION.format(reason))
                return (lambda function: function) if model is None else model
            self._assume(_COMPILATION_ASSUMPTION)
            if options.get("fullgraph") and isinstance(model, torch.nn.Module):
                # Dynamo has to trace the module's call without memprof's patch of `__call__`.
                with self._patches.suspended():
                    return original(model, **options)
            return original(model, **options)

        yield torch, "compile", compile_

    @contextlib.contextmanager
    def around(self, context: InstallContext) -> Iterator[None]:
        """Context manager: functions compiled before the run are compiled for the GPU; at exit, undo all patches."""
        with contextlib.ExitStack() as stack:
            if dynamo.catch_errors.is_imported():
                if not self._reason_not_to_compile:
                    self._try_install(self._patch_frame_entry)
                if self._reason_not_to_compile:
                    stack.enter_context(torch.compiler.set_stance("force_eager"))
            try:
                yield
            finally:
                self._compiler_patches.undo()
                self._exit_stack.close()

    def leave_in_child(self) -> None:
        """Undo the compiler's patches in a forked process, and keep the folder of generated files for the parent."""
        self._compiler_patches.undo()
        self._exit_stack.pop_all()

    # -- installed when something is compiled -----------------------------------------------------------------------

    def install(self) -> None:
        """Import torch's compiler and install the patches, at the first call in a run."""
        if not self._is_installed:
            self._is_installed = True
            self._try_install(self._install_patches)

    def _try_install(self, install: Callable[[], None]) -> None:
        """Call `install`; if torch lacks a name or no folder can be written, undo the patches and record the reason."""
        try:
            install()
        except (ImportError, AttributeError) as error:
            # Releases of torch differ in their private names, and some builds have no compiler.
            self._compiler_patches.undo()
            self._reason_not_to_compile = f", for torch {torch.__version__} is not prepared for it ({error})"
        except OSError as error:
            self._compiler_patches.undo()
            self._reason_not_to_compile = f", for there is no folder to write its code in ({error})"

    def _install_patches(self) -> None:
        with self._patches.suspended():
            for module in (dynamo.functorch_config, inductor.compile_fx):
                module.get()  # imports it
            # torch builds tables of its functions at the first call, and keeps them: build them without patches.
            dynamo.get_torch_obj_rule_map()
            if dynamo.get_handlers.exists():
                dynamo.get_handlers()
        from memprof.virtual.compiled import saved_tensors, side_effects, tracing, wrapper

        self._properties = torch.cuda.get_device_properties(0)
        # Backends of others, such as vLLM's, ask for a pool while they compile.
        pool_patch: Patch = (torch.cuda, "graph_pool_handle", torch.cuda.graph_pool_handle)
        self._driver_patches = [*patch_driver(self._device_state.gpus), pool_patch]
        self._device_choices = tracing.DeviceChoices(self._device_state)
        self._patch_frame_entry()
        self._compiler_patches.apply_all(self._make_patches())
        self._compiler_patches.apply_all(self._diagnostics.patches())
        self._compiler_patches.apply_all(saved_tensors.patches(self._diagnostics.record_saved_tensors))
        self._compiler_patches.apply_all(side_effects.patches(self._suspension, self._function_mode, self._assume))
        self._compiler_patches.apply_all(
            wrapper.patches(self._device_state, self._origins, self._diagnostics.record_kernel)
        )
        wrapper.register_rng_operators(type(self._device_state))
        with self._suspension():
            pass  # raises here if the release of torch lacks a patched name
        self._folder = tempfile.mkdtemp(prefix="memprof-inductor-")
        self._exit_stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
        GENERATED_CODE_FOLDERS.append(self._folder)
        self._exit_stack.callback(GENERATED_CODE_FOLDERS.remove, self._folder)
        self._exit_stack.callback(_set_cache_folder, os.environ.get(_CACHE_VARIABLE))
        _set_cache_folder(self._folder)
        self._exit_stack.callback(self._restore_dynamo, list(dynamo.SKIP_DIRS.get()))
        for name in _SKIPPED_PACKAGES:
            dynamo.skip_module(f"memprof.{name}")
        self._exit_stack.enter_context(side_effects.register_constant_type(type(self._properties)))

    def _restore_dynamo(self, skipped_folders: list[str]) -> None:
        dynamo.SKIP_DIRS.get()[:] = skipped_folders
        dynamo.recompile_re()
        with self._patches.suspended():
            dynamo.reset()

    def _patch_frame_entry(self) -> None:
        """Patch the function that Dynamo calls for each new frame, to compile the frame without memprof's modes."""
        original_call, make_skipped_result = dynamo.catch_errors.get(), dynamo.ConvertFrameReturn.get()
        if "memprof" in original_call.__module__:
            return
        counters = dynamo.counters.get()

        def compile_frame(self_: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
            is_called_by_memprof = sys._getframe(1).f_code.co_filename.startswith(_SKIPPED_FOLDERS)
            if is_called_by_memprof and not is_program(frame.f_code):
                return make_skipped_result()
            self.install()
            outer_name, code = self._function_name, frame.f_code
            self._function_name = f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"
            num_frames, is_skipped = counters["frames"]["total"], False
            try:
                with self._measure_time(), self._suspension():
                    result = original_call(self_, frame, *args, **kwargs)
                is_skipped = result.guarded_code is None and counters["frames"]["total"] == num_frames
                if result.frame_exec_strategy.cur_action.name == "RUN_ONLY":
                    self._diagnostics.report_recompile_limit(self._function_name)
                return result
            except dynamo.InternalTorchDynamoError.get() as error:
                self._report_fallback(error)
                return make_skipped_result()
            finally:
                self._function_name = outer_name
                if self._suspension.are_modes_active and not is_skipped:
                    gc.collect()  # a real run collects during compilation: tracing leaves reference cycles

        self._compiler_patches.set(*dynamo.catch_errors.patch(compile_frame))

    @contextlib.contextmanager
    def _measure_time(self) -> Iterator[None]:
        """Context manager: add the elapsed time to the compile time, unless inside another measurement."""
        is_outer, start = self._suspension.are_modes_active, time.perf_counter()
        try:
            yield
        finally:
            if is_outer:
                self._diagnostics.add_compile_time(time.perf_counter() - start)

    def _report_fallback(self, error: BaseException) -> None:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        self._assume(
            f"{self._function_name} is not compiled here and runs eagerly: {reason[:200] or type(error).__name__}."
        )

    def _make_patches(self) -> Iterator[Patch]:
        """Yield the patches of Dynamo's and Inductor's functions that are active during the entire run."""
        suspension, activate_choices = self._suspension, self._device_choices.activate
        build = dynamo.build_guards.get()
        original_compile, original_inner = inductor.compile_fx.get(), inductor.compile_fx_inner.get()

        def build_guards(manager: Any, code: Any, output_graph: Any = None, *args: Any, **kwargs: Any) -> None:
            # Guards are checked while the program runs, under memprof's patches.
            with suspension.resume():
                build(manager, code, output_graph, *args, **kwargs)

        def wrap_with_choices(function: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                with activate_choices():
                    return function(*args, **kwargs)

            return run

        def compile_inner(graph: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            with self._measure_time(), suspension():
                return original_inner(graph, inputs, *args, **kwargs)

        def compile_with_graphs(graph: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            compiled = compile_inner(graph, inputs, *args, **kwargs)
            self._graphs.wrap_compiled(compiled, kwargs, self._function_name)
            return compiled

        def compile_on_gpu(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if "inner_compile" in kwargs:  # compile_fx calls itself with its settings
                return original_compile(model, inputs, *args, **kwargs)
            if not _uses_gpu(model, inputs):
                return model
            options, uses_graphs = self._split_settings(kwargs.get("config_patches"))
            kwargs["config_patches"] = options
            compile_graph = compile_with_graphs if uses_graphs else compile_inner
            eager_model = torch.fx.GraphModule(model, copy.deepcopy(model.graph))  # compilation may change the graph
            try:
                with suspension():
                    return original_compile(model, inputs, *(args or (compile_graph,)), **kwargs)
            except Exception as error:  # any error: what Inductor does not compile without a GPU runs eagerly
                self._report_fallback(error)
                return eager_model

        yield dynamo.build_guards.patch(build_guards)
        yield dynamo.guard_on_torch_function_state.patch(lambda builder, guard: None)
        for name in (dynamo.run_node, dynamo.call_user_compiler):
            yield name.patch(wrap_with_choices(name.get()))
        yield inductor.compile_fx.patch(compile_on_gpu)
        original_to_module = inductor.compile_to_module.get()

        def compile_to_module(graph: Any) -> Any:
            module = original_to_module(graph)
            self._origins.record_buffers(graph, str(module.__file__))
            return module

        yield inductor.compile_to_module.patch(compile_to_module)

    def _split_settings(self, options: dict[str, Any] | None) -> tuple[dict[str, Any], bool]:
        """Return the Inductor `options` without those that time kernels, and whether CUDA graphs are used."""
        options = dict(options or {})
        timing_options = [name for name in _TIMING_OPTIONS if options.pop(name, False)]
        if timing_options:
            self._assume(_NO_TIMING_ASSUMPTION.format(", ".join(timing_options)))
        return options, options.pop("triton.cudagraphs", self._uses_cuda_graphs)

    @contextlib.contextmanager
    def _prepare_compilation(self) -> Iterator[None]:
        """Context manager: apply the patches and settings with which torch's compiler compiles for the virtual GPU."""
        from memprof.virtual.compiled import convolution_formats, tracing

        dynamo_config, aot_config = dynamo.config.get(), dynamo.functorch_config.get()
        inductor_config = inductor.config.get()
        self._uses_cuda_graphs = bool(inductor_config.triton.cudagraphs)
        timing_options = [name for name in _TIMING_OPTIONS if getattr(inductor_config, name, False)]
        if timing_options:
            self._assume(_NO_TIMING_ASSUMPTION.format(", ".join(timing_options)))
        compile_patches = PatchSet()
        _clear_triton_caches()
        try:
            compile_patches.apply_all(tracing.patches(self._device_state))
            compile_patches.apply_all(convolution_formats.patches(self._device_state.gpu))
            compile_patches.apply_all(_gpu_patches(self._device_state.gpus, self._properties, self._driver_patches))
            with (
                dynamo_config.patch(_select_supported_settings(dynamo_config, _DYNAMO_SETTINGS)),
                inductor_config.patch(_select_supported_settings(inductor_config, _INDUCTOR_SETTINGS)),
                aot_config.patch(_select_supported_settings(aot_config, _AOT_SETTINGS)),
                warnings.catch_warnings(),
            ):
                # Dynamo reads `.grad` of results of layers, which is no mistake of the program.
                warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
                yield
        finally:
            compile_patches.undo(excluded_folder=self._folder)  # generated code keeps the patches of the driver
            _clear_triton_caches()


def _gpu_patches(gpus: Gpus, properties: Any, driver_patches: list[Patch]) -> Iterator[Patch]:
    """Yield patches of the private functions by which Dynamo and Inductor query the GPU."""
    # Inductor queries the accelerator's streams.
    yield from (patch for patch in driver_patches if patch[1].startswith("_cuda") or patch[1] in _KEPT_NAMES)
    # torch built for CUDA would query the current device of a driver that does not exist.
    yield cuda.accelerator_get_accelerator.patch(make_constant_function(None))
    for private_name in (cuda.exchange_device_of_torch, cuda.maybe_exchange_device_of_torch):
        yield private_name.patch(lambda device: gpus.select(device))
    for private_name in (dynamo.cuda_exchange_device, dynamo.cuda_maybe_exchange_device):
        yield private_name.patch(staticmethod(gpus.select))
    yield cuda.is_compiled.patch(make_constant_function(True))
    yield cuda.initialized.patch(True)
    yield cuda.cached_device_count.patch(gpus.num_gpus)
    yield cuda.get_device_properties.patch(make_constant_function(properties))
    yield dynamo.get_cuda_stream.patch(make_constant_function(0))
    yield dynamo.caching_worker_device_properties.patch({"cuda": [properties] * gpus.num_gpus})
    yield dynamo.caching_worker_current_devices.patch({})
    yield dynamo.cuda_get_raw_stream.patch(staticmethod(make_constant_function(0)))
    yield inductor.triton_hash_with_backend.patch(make_constant_function("memprof"))
    triton_driver = sys.modules.get("triton.runtime.driver")
    if triton_driver is not None:
        # Triton compiles the program's kernels for a target; the first stage shows which arguments a kernel writes.
        compiler: Any = importlib.import_module("triton.backends.compiler")
        target = compiler.GPUTarget("cuda", 10 * properties.major + properties.minor, properties.warp_size)
        yield triton_driver.driver, "_active", SimpleNamespace(get_current_target=make_constant_function(target))


def _clear_triton_caches() -> None:
    """Clear torch's caches of Triton's features, which differ with and without the virtual GPU."""
    for function in vars(inductor.triton.get()).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


def _set_cache_folder(folder: str | None) -> None:
    if folder is None:
        os.environ.pop(_CACHE_VARIABLE, None)
    else:
        os.environ[_CACHE_VARIABLE] = folder


def _select_supported_settings(module: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Return those of `settings` that the configuration module `module` of this torch release has."""
    names = set(module.get_config_copy()) if hasattr(module, "get_config_copy") else set(module._config)
    return {name: value for name, value in settings.items() if name in names}


def _uses_gpu(graph_module: Any, inputs: Any) -> bool:
    """Return whether a tensor of the graph is on the GPU. Other graphs run eagerly, since their results are needed."""
    values = [*inputs, *(node.meta.get("example_value") for node in graph_module.graph.nodes)]
    return any(isinstance(value, torch.Tensor) and value.device.type == "cuda" for value in values)


# Functions of torchao (torchao/optim/adam.py) that are always compiled and only write into their arguments. Inductor
# makes one kernel of each: elementwise operators around two maxima over a block of state. Tracing for the shape of each
# parameter would take longer than the rest of a run.
_FUSED_FUNCTION_ASSUMPTIONS = {
    "single_param_adam": (
        "torchao's optimizers update each parameter in one compiled kernel: nothing is allocated beside their state."
    )
}
