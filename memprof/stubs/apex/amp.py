"""apex.amp: models cast to half precision, float32 master copies of their weights, and scaled losses.

Sources: apex/amp/frontend.py, _initialize.py, _process_optimizer.py, handle.py and scaler.py, apex/fp16_utils/
fp16util.py of NVIDIA/apex@25.05; casts.py has the casts of O1. No gradient is found to overflow.
"""

from __future__ import annotations

import contextlib
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from memprof.stubs.apex.casts import get_cast_state, install_casts, suspend_casts
from memprof.stubs.apex.multi_tensor import multi_tensor_step
from memprof.stubs.fused_optimizers import CHUNK_SIZE
from memprof.stubs.registry import register_in
from memprof.stubs.tools import call_at_end, check_on_gpu, keep_for_run, unsupported_error
from memprof.torch_private import tensors

_SOURCE = "NVIDIA/apex@25.05:apex/amp/"
# Optimization level -> cast_model_type, keep_batchnorm_fp32, master_weights, loss_scale.
_LEVELS = {
    "O0": (torch.float32, None, False, 1.0),
    "O1": (None, None, None, "dynamic"),
    "O2": (torch.float16, True, True, "dynamic"),
    "O3": (torch.float16, False, False, 1.0),
}
_INITIAL_SCALE = 2.0**16


class _Scaler:
    """The scale of one loss, with an overflow flag on the GPU."""

    def __init__(self, scale, max_scale: float) -> None:
        self.is_dynamic = scale == "dynamic"
        self.scale = min(max_scale, _INITIAL_SCALE) if self.is_dynamic else float(scale)
        self.overflow_flag = torch.tensor([0], dtype=torch.int, device="cuda")
        self.num_steps = 0


class _AmpState(NamedTuple):
    is_enabled: bool
    has_master_weights: bool
    scalers: list[_Scaler]


def _get_states() -> list[_AmpState]:
    """Return a list with the state that this run's last call of `initialize` stored; empty before the first call."""
    return keep_for_run("apex.amp", list)


def _register(file: str) -> Callable[[Any], Any]:
    return register_in(f"apex.amp.{file}", "apex.amp", source=f"{_SOURCE}{file}.py")


@_register("frontend")
def initialize(
    models, optimizers=None, enabled=True, opt_level="O1", cast_model_type=None, patch_torch_functions=None,
    keep_batchnorm_fp32=None, master_weights=None, loss_scale=None, cast_model_outputs=None, num_losses=1, verbosity=1,
    min_loss_scale=None, max_loss_scale=2.0**24,
):  # fmt: skip
    """Cast models, add float32 master weights to optimizers, patch functions with casts (O1); returns both."""
    if not enabled:
        _get_states()[:] = [_AmpState(False, False, [])]
        return models if optimizers is None else (models, optimizers)
    check_on_gpu("apex.amp.initialize")
    if opt_level not in _LEVELS:
        raise RuntimeError(f"Unexpected optimization level {opt_level}. Options are 'O0', 'O1', 'O2', 'O3'.")
    patches_functions = opt_level == "O1" if patch_torch_functions is None else bool(patch_torch_functions)
    if patches_functions != (opt_level == "O1"):
        hint = 'functions are patched at opt_level="O1" and at no other: leave patch_torch_functions out'
        raise unsupported_error(
            "apex.amp.initialize", f"patch_torch_functions={patch_torch_functions} at {opt_level}", hint
        )
    arguments = (cast_model_type, keep_batchnorm_fp32, master_weights, loss_scale)
    dtype, keep_batchnorm_fp32, master_weights, loss_scale = (
        default if value is None else value for value, default in zip(arguments, _LEVELS[opt_level], strict=True)
    )
    for model in _as_list(models):
        _cast_model(model, dtype, keep_batchnorm_fp32 in (True, "True"), cast_model_outputs)
    for optimizer in _as_list(optimizers):
        if dtype:
            optimizer.load_state_dict(optimizer.state_dict())
        _add_master_weights(optimizer, bool(master_weights))
    scalers = [_Scaler(loss_scale, max_loss_scale) for _ in range(num_losses)]
    if patches_functions:
        call_at_end(install_casts().undo)
        for optimizer in _as_list(optimizers):
            optimizer.step = types.MethodType(suspend_casts(optimizer.step), optimizer)
    _get_states()[:] = [_AmpState(True, bool(master_weights), scalers)]
    return models if optimizers is None or optimizers == [] else (models, optimizers)


def _as_list(value) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list) else [value]


def _cast_model(model: nn.Module, dtype, keeps_batch_norms: bool, output_dtype) -> None:
    """Cast a model to `dtype` unless it is None, and wrap its forward to cast inputs to it and outputs."""
    if dtype:
        if keeps_batch_norms:
            _cast_without_batch_norms(model, dtype)
        else:
            model.to(dtype)
        output_dtype = torch.float32 if output_dtype is None else output_dtype
    if output_dtype is None:
        return
    forward = model.forward

    def forward_with_casts(*args, **kwargs):
        if dtype:
            args, kwargs = _cast_nested(dtype, args), _cast_nested(dtype, kwargs)
        return _cast_nested(output_dtype, forward(*args, **kwargs))

    model.forward = forward_with_casts  # type: ignore[method-assign]


def _cast_without_batch_norms(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters and buffers of `model` except those of batch norms (apex's convert_network)."""
    for module in model.modules():
        if isinstance(module, tensors.BatchNorm) and module.affine:
            continue
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.dtype.is_floating_point:
                tensor.data = tensor.data.to(dtype=dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def _cast_nested(dtype: torch.dtype, value):
    if isinstance(value, str) or (isinstance(value, torch.Tensor) and not value.is_floating_point()):
        return value
    if hasattr(value, "to"):
        return value.to(dtype)
    if isinstance(value, Mapping):
        return {_cast_nested(dtype, name): _cast_nested(dtype, item) for name, item in value.items()}
    if isinstance(value, Iterable):
        return type(value)(_cast_nested(dtype, item) for item in value)  # type: ignore[call-arg]
    return value


class _OptimizerStash:
    """An optimizer's parameters: those in half precision, their float32 master copies, and all other ones."""

    def __init__(self, has_master_weights: bool) -> None:
        self.has_master_weights = has_master_weights
        self.is_ready = False
        self.overflow_flag = torch.tensor([0], dtype=torch.int, device="cuda")
        self.half_parameters: list[torch.Tensor] = []
        self.master_parameters: list[torch.Tensor] = []
        self.other_parameters: list[torch.Tensor] = []
        self.other_gradients: list[Any] = []

    def replace_parameters(self, optimizer) -> None:
        """Replace half-precision parameters in `optimizer` by float32 master copies, at the first call."""
        if self.is_ready:
            return
        self.is_ready = True
        for group in optimizer.param_groups:
            for i, parameter in enumerate(group["params"]):
                if not self.has_master_weights or parameter.dtype != torch.float16:
                    self.other_parameters.append(parameter)
                elif parameter.requires_grad:
                    master = parameter.detach().clone().float()
                    master.requires_grad = True
                    group["params"][i] = master
                    self.half_parameters.append(parameter)
                    self.master_parameters.append(master)
                    if parameter in optimizer.state:
                        optimizer.state[master] = optimizer.state.pop(parameter)
        if self.has_master_weights:
            optimizer.load_state_dict(optimizer.state_dict())

    def clear_gradients(self, optimizer) -> None:
        """Set gradients to None before a backward; keep those of parameters without a master copy."""
        self.replace_parameters(optimizer)
        self.other_gradients = [parameter.grad for parameter in self.other_parameters]
        for parameter in (*self.half_parameters, *self.other_parameters):
            parameter.grad = None

    def unscale_gradients(self, scaler: _Scaler) -> None:
        """Unscale half-precision gradients into the master copies' gradients, and other gradients in place."""
        all_pairs = zip(self.half_parameters, self.master_parameters, strict=True)
        pairs = [pair for pair in all_pairs if pair[0].grad is not None]
        for _, master in pairs:
            if master.grad is None:
                master.grad = torch.empty_like(master)
        if pairs:
            lists = [[half.grad for half, _ in pairs], [master.grad for _, master in pairs]]
            multi_tensor_step(CHUNK_SIZE, scaler.overflow_flag, lists)
        if scaler.scale != 1.0 or scaler.is_dynamic:
            for parameter, gradient in zip(self.other_parameters, self.other_gradients, strict=True):
                if parameter.grad is None:
                    parameter.grad = gradient
            gradients = [parameter.grad for parameter in self.other_parameters if parameter.grad is not None]
            if gradients:
                multi_tensor_step(CHUNK_SIZE, scaler.overflow_flag, [gradients, gradients])
        self.other_gradients = []


def _add_master_weights(optimizer, has_master_weights: bool) -> None:
    if hasattr(optimizer, "_amp_stash"):
        raise RuntimeError("A given optimizer should only be passed through amp.initialize once.")
    stash = optimizer._amp_stash = _OptimizerStash(has_master_weights)
    if not has_master_weights:
        return
    step = optimizer.step

    def step_and_copy(self, closure=None):
        if closure is not None:
            raise RuntimeError("Currently, Amp does not support closure use with optimizers.")
        result = step()
        if stash.half_parameters:
            multi_tensor_step(CHUNK_SIZE, stash.overflow_flag, [stash.master_parameters, stash.half_parameters])
        for master in stash.master_parameters:
            master.grad = None
        return result

    def zero_grad(self) -> None:
        stash.replace_parameters(optimizer)
        for parameter in (*stash.half_parameters, *stash.other_parameters):
            if parameter.grad is not None:
                parameter.grad.detach_()
                parameter.grad.zero_()
        for master in stash.master_parameters:
            master.grad = None

    optimizer.step = types.MethodType(step_and_copy, optimizer)
    optimizer.zero_grad = types.MethodType(zero_grad, optimizer)


@_register("handle")
@contextlib.contextmanager
def scale_loss(loss, optimizers, loss_id=0, model=None, delay_unscale=False, delay_overflow_check=False):
    """Context manager: yield the scaled loss in float32; on exit, unscale the gradients."""
    if not _get_states():
        raise RuntimeError("Invoked 'with amp.scale_loss`, but amp.initialize has not been called.")
    state = _get_states()[0]
    if not state.is_enabled:
        yield loss
        return
    scaler = state.scalers[loss_id]
    if not state.has_master_weights and not scaler.is_dynamic and scaler.scale == 1.0:
        yield loss.float()
    elif delay_unscale:
        yield loss.float() * scaler.scale
    else:
        for optimizer in _as_list(optimizers):
            optimizer._amp_stash.clear_gradients(optimizer)
        yield loss.float() * scaler.scale
        scaler.overflow_flag.zero_()
        for optimizer in _as_list(optimizers):
            optimizer._amp_stash.unscale_gradients(scaler)
        scaler.num_steps += 1
    get_cast_state().half_by_parameter.clear()


@_register("_amp_state")
def master_params(optimizer):
    """Yield the parameters in the optimizer's groups, master copies included; nothing is allocated."""
    for group in optimizer.param_groups:
        yield from group["params"]


@_register("handle")
@contextlib.contextmanager
def disable_casts():
    """Context manager: functions that O1 patches do not cast their arguments."""
    get_cast_state().is_active = False
    yield
    get_cast_state().is_active = True


@_register("frontend")
def state_dict(destination=None):
    """Return the scales of the losses and their numbers of steps; nothing is allocated."""
    result = OrderedDict() if destination is None else destination
    for i, scaler in enumerate(_get_states()[0].scalers if _get_states() else ()):
        result[f"loss_scaler{i}"] = {"loss_scale": scaler.scale, "unskipped": scaler.num_steps}
    return result


@_register("frontend")
def load_state_dict(state_dict):
    """Load the scales of the losses from a checkpoint; nothing is allocated."""
    for scaler, state in zip(_get_states()[0].scalers if _get_states() else (), state_dict.values(), strict=False):
        scaler.scale, scaler.num_steps = state["loss_scale"], state["unskipped"]
