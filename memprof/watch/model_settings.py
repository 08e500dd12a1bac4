"""Settings of a program's models: activation checkpointing, eval mode, attributes that freeze no parameters, and
calls of torch.no_grad() that do nothing."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import nn

from memprof.trace.events import NONE, EvalCall, FrozenInVain, ModuleRole
from memprof.watch.program_code import is_own_file
from memprof.watch.recorder import Recorder
from memprof.watch.source_lines import list_attribute_lines, list_unused_no_grads, read_line
from memprof.watch.variables import ProgramVariables

# The name of the property in transformers today, and before; diffusers has the second.
_CHECKPOINTING_FLAGS = ("is_activation_checkpointing", "is_gradient_checkpointing")


def is_checkpointing(model: nn.Module) -> bool:
    """Return whether the program has switched on activation checkpointing in `model`, or in a model within it."""
    for module in model.modules():
        flag = next((name for name in _CHECKPOINTING_FLAGS if hasattr(type(module), name)), None)
        if flag is not None and getattr(module, flag):
            return True
    return False


class ModelSettingsWatch:
    """Watch over the settings of models, which are written into the trace."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._seen: set[int] = set()  # indices of the models that were called with gradients
        self._read_files: set[str] = set()

    def record_call(self, model: nn.Module, index: int) -> None:
        """Record an outermost call of `model`; it is looked at in the first that has gradients."""
        if index in self._seen or not torch.is_grad_enabled():
            return
        self._seen.add(index)
        trace = self._recorder.trace
        trace.checkpoints = trace.checkpoints or is_checkpointing(model)
        self._record_unused_no_grads(sys._getframe(1))
        with torch.DisableTorchFunction():
            for module in model.modules():
                if vars(module).get("requires_grad") is False and not _has_own_flag(type(module)):
                    self._record_frozen_in_vain(module)

    def _record_unused_no_grads(self, frame: FrameType | None) -> None:
        """Record the statements of the program's files that run which call torch.no_grad(), and do not use it."""
        while frame is not None:
            file = frame.f_code.co_filename
            if file not in self._read_files and is_own_file(file):
                self._read_files.add(file)
                self._recorder.trace.unused_no_grads += list_unused_no_grads(file)
            frame = frame.f_back

    def _record_frozen_in_vain(self, module: nn.Module) -> None:
        """Record a `module` that has an attribute `requires_grad`, if all its parameters require gradients."""
        trace, storages = self._recorder.trace, self._recorder.storages
        index = self._recorder.modules.get_index(module)
        parameters = {storages.get_index(parameter) for parameter in module.parameters()} - {NONE}
        if index != NONE and parameters and all(parameter.requires_grad for parameter in module.parameters()):
            line = self._find_frozen_line(trace.modules[index].path.rpartition(".")[2])
            trace.frozen_in_vain.append(FrozenInVain(index, line, tuple(sorted(parameters))))

    def _find_frozen_line(self, name: str) -> str | None:
        """Return the only line of the program that sets an attribute `requires_grad`, or that sets it on `name`."""
        variables = ProgramVariables(self._recorder)
        lines = list_attribute_lines([*variables.codes, *variables.iterate_global_codes()], "requires_grad")
        named = [line for line in lines if f"{name}.requires_grad" in read_line(line)]
        return next((found[0] for found in (named, lines) if len(found) == 1), None)

    def wrap_train(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the replacement for `nn.Module.train`, which records the line that puts a model into eval mode."""

        @functools.wraps(original)
        def train(module: nn.Module, mode: bool = True) -> Any:
            modules, trace = self._recorder.modules, self._recorder.trace
            index = NONE if mode or not module.training else modules.get_index(module)
            if index != NONE and modules.table[index].role is ModuleRole.ROOT:
                frame: FrameType | None = sys._getframe(1)
                while frame is not None and not is_own_file(frame.f_code.co_filename):
                    frame = frame.f_back
                source = self._recorder.attribution.find_source_index(frame)
                trace.eval_calls.append(EvalCall(len(trace.events), index, source))
            return original(module, mode)

        return train


def _has_own_flag(kind: type) -> bool:
    """Return whether the code of class `kind` reads or sets `requires_grad`, which then is an attribute of its own."""
    functions = (part for part in vars(kind).values() if isinstance(part, FunctionType))
    return any("requires_grad" in function.__code__.co_names for function in functions)
