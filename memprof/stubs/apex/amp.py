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

from memprof.stubs.apex.casts import casts, install, suspend_casts
from memprof.stubs.apex.multi_tensor import multi_tensor_step
from memprof.stubs.fused_optimizers import CHUNK
from memprof.stubs.registry import register_in
from memprof.stubs.tools import call_at_end, check_on_gpu, keep_for_run, unsupported_error
from memprof.torch_private import tensors

_AT = "NVIDIA/apex@25.05:apex/amp/"
_LEVELS: dict[str, dict[str, Any]] = {
    name: dict(zip(("cast_model_type", "keep_batchnorm_fp32", "master_weights", "loss_scale"), values, strict=True))
    for name, values in {
        "O0": (torch.float32, None, False, 1.0),
        "O1": (None, None, None, "dynamic"),
        "O2": (torch.float16, True, True, "dynamic"),
        "O3": (torch.float16, False, False, 1.0),
    }.items()
}
_FIRST_SCALE = 2.0**16


class _Scaler:
    """The scaler of one loss, whose overflow flag is on the GPU."""

    def __init__(self, scale, most: float) -> None:
        self.dynamic = scale == "dynamic"
        self.scale = min(most, _FIRST_SCALE) if self.dynamic else float(scale)
        self.overflow = torch.tensor([0], dtype=torch.int, device="cuda")
        self.steps = 0


class _AmpState(NamedTuple):
    enabled: bool
    masters: bool
    scalers: list[_Scaler]


def _states() -> list[_AmpState]:
    """Return the states of the last call of `initialize` in this run."""
    return keep_for_run("apex.amp", list)


def _public(file: str) -> Callable[[Any], Any]:
    return register_in(f"apex.amp.{file}", "apex.amp", source=f"{_AT}{file}.py")


@_public("frontend")
def initialize(
    models, optimizers=None, enabled=True, opt_level="O1", cast_model_type=None, patch_torch_functions=None,
    keep_batchnorm_fp32=None, master_weights=None, loss_scale=None, cast_model_outputs=None, num_losses=1, verbosity=1,
    min_loss_scale=None, max_loss_scale=2.0**24,
):  # fmt: skip
    """Cast models, give optimizers float32 master weights, cast functions at O1, and allocate overflow flags."""
    if not enabled:
        _states()[:] = [_AmpState(False, False, [])]
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
    given = {"cast_model_type": cast_model_type, "keep_batchnorm_fp32": keep_batchnorm_fp32}
    given |= {"master_weights": master_weights, "loss_scale": loss_scale}
    options = _LEVELS[opt_level] | {name: value for name, value in given.items() if value is not None}
    for model in _as_list(models):
        _cast_model(model, options, cast_model_outputs)
    for optimizer in _as_list(optimizers):
        if options["cast_model_type"]:
            optimizer.load_state_dict(optimizer.state_dict())
        _add_master_weights(optimizer, bool(options["master_weights"]))
    scalers = [_Scaler(options["loss_scale"], max_loss_scale) for _ in range(num_losses)]
    if patches_functions:
        call_at_end(install().undo)
        for optimizer in _as_list(optimizers):
            optimizer.step = types.MethodType(suspend_casts(optimizer.step), optimizer)
    _states()[:] = [_AmpState(True, bool(options["master_weights"]), scalers)]
    return models if optimizers is None or optimizers == [] else (models, optimizers)


def _as_list(given) -> list[Any]:
    return [] if given is None else list(given) if isinstance(given, list) else [given]


def _cast_model(model: nn.Module, options: dict[str, Any], outputs) -> None:
    dtype = options["cast_model_type"]
    if dtype:
        if options["keep_batchnorm_fp32"] in (True, "True"):
            _cast_without_batch_norms(model, dtype)
        else:
            model.to(dtype)
        outputs = torch.float32 if outputs is None else outputs
    if outputs is None:
        return
    forward = model.forward

    def cast(*args, **kwargs):
        if dtype:
            args, kwargs = _cast_nested(dtype, args), _cast_nested(dtype, kwargs)
        return _cast_nested(outputs, forward(*args, **kwargs))

    model.forward = cast  # type: ignore[method-assign]


def _cast_without_batch_norms(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast each tensor of the model, except those of batch norms (convert_network)."""
    for module in model.modules():
        if isinstance(module, tensors.BatchNorm) and module.affine:
            continue
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.dtype.is_floating_point:
                tensor.data = tensor.data.to(dtype=dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def _cast_nested(dtype: torch.dtype, value):
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, str):
        return value
    if hasattr(value, "to"):
        return value.to(dtype)
    if isinstance(value, Mapping):
        return {_cast_nested(dtype, name): _cast_nested(dtype, one) for name, one in value.items()}
    if isinstance(value, Iterable):
        return type(value)(_cast_nested(dtype, one) for one in value)  # type: ignore[call-arg]
    return value


class _Stash:
    """The parameters of an optimizer: those in half precision with their master copies, and the others."""

    def __init__(self, masters: bool) -> None:
        self.keeps_masters = masters
        self.is_ready = False
        self.overflow = torch.tensor([0], dtype=torch.int, device="cuda")
        self.halves: list[torch.Tensor] = []
        self.masters: list[torch.Tensor] = []
        self.others: list[torch.Tensor] = []
        self.gradients: list[Any] = []

    def prepare(self, optimizer) -> None:
        """Replace the parameters in the optimizer by master copies, at the first step."""
        if self.is_ready:
            return
        self.is_ready = True
        for group in optimizer.param_groups:
            for number, parameter in enumerate(group["params"]):
                if not self.keeps_masters or parameter.dtype != torch.float16:
                    self.others.append(parameter)
                elif parameter.requires_grad:
                    master = parameter.detach().clone().float()
                    master.requires_grad = True
                    group["params"][number] = master
                    self.halves.append(parameter)
                    self.masters.append(master)
                    if parameter in optimizer.state:
                        optimizer.state[master] = optimizer.state.pop(parameter)
        if self.keeps_masters:
            optimizer.load_state_dict(optimizer.state_dict())

    def before_backward(self, optimizer) -> None:
        """Set gradients to None, so that autograd need not add to them."""
        self.prepare(optimizer)
        self.gradients = [parameter.grad for parameter in self.others]
        for parameter in (*self.halves, *self.others):
            parameter.grad = None

    def after_backward(self, scaler: _Scaler) -> None:
        """Unscale the half-precision gradients into those of the master copies; other gradients stay in place."""
        pairs = [pair for pair in zip(self.halves, self.masters, strict=True) if pair[0].grad is not None]
        for _, master in pairs:
            if master.grad is None:
                master.grad = torch.empty_like(master)
        if pairs:
            multi_tensor_step(CHUNK, scaler.overflow, [[h.grad for h, _ in pairs], [m.grad for _, m in pairs]])
        if scaler.scale != 1.0 or scaler.dynamic:
            for parameter, gradient in zip(self.others, self.gradients, strict=True):
                if parameter.grad is None:
                    parameter.grad = gradient
            gradients = [parameter.grad for parameter in self.others if parameter.grad is not None]
            if gradients:
                multi_tensor_step(CHUNK, scaler.overflow, [gradients, gradients])
        self.gradients = []


def _add_master_weights(optimizer, masters: bool) -> None:
    if hasattr(optimizer, "_amp_stash"):
        raise RuntimeError("A given optimizer should only be passed through amp.initialize once.")
    stash = optimizer._amp_stash = _Stash(masters)
    if not masters:
        return
    step = optimizer.step

    def new_step(self, closure=None):
        if closure is not None:
            raise RuntimeError("Currently, Amp does not support closure use with optimizers.")
        result = step()
        if stash.halves:
            multi_tensor_step(CHUNK, stash.overflow, [stash.masters, stash.halves])
        for master in stash.masters:
            master.grad = None
        return result

    def zero_grad(self) -> None:
        stash.prepare(optimizer)
        for parameter in (*stash.halves, *stash.others):
            if parameter.grad is not None:
                parameter.grad.detach_()
                parameter.grad.zero_()
        for master in stash.masters:
            master.grad = None

    optimizer.step = types.MethodType(new_step, optimizer)
    optimizer.zero_grad = types.MethodType(zero_grad, optimizer)


@_public("handle")
@contextlib.contextmanager
def scale_loss(loss, optimizers, loss_id=0, model=None, delay_unscale=False, delay_overflow_check=False):
    """Context manager: yield the loss in float32, scaled; unscale its gradients afterwards."""
    if not _states():
        raise RuntimeError("Invoked 'with amp.scale_loss`, but amp.initialize has not been called.")
    state = _states()[0]
    if not state.enabled:
        yield loss
        return
    scaler = state.scalers[loss_id]
    if not state.masters and not scaler.dynamic and scaler.scale == 1.0:
        yield loss.float()
        casts().cache.clear()
        return
    stashes = [optimizer._amp_stash for optimizer in _as_list(optimizers)]
    if not delay_unscale:
        for stash, optimizer in zip(stashes, _as_list(optimizers), strict=True):
            stash.before_backward(optimizer)
    yield loss.float() * scaler.scale
    if not delay_unscale:
        scaler.overflow.zero_()
        for stash in stashes:
            stash.after_backward(scaler)
        scaler.steps += 1
    casts().cache.clear()


@_public("_amp_state")
def master_params(optimizer):
    """Yield the parameters that the optimizer steps; nothing is allocated."""
    for group in optimizer.param_groups:
        yield from group["params"]


@_public("handle")
@contextlib.contextmanager
def disable_casts():
    """Context manager: disable the casts of O1."""
    casts().active = False
    yield
    casts().active = True


@_public("frontend")
def state_dict(destination=None):
    """Return the scales of the losses; nothing is allocated."""
    made = OrderedDict() if destination is None else destination
    for number, scaler in enumerate(_states()[0].scalers if _states() else ()):
        made[f"loss_scaler{number}"] = {"loss_scale": scaler.scale, "unskipped": scaler.steps}
    return made


@_public("frontend")
def load_state_dict(state_dict):
    """Load the scales of the losses from a checkpoint; nothing is allocated."""
    for scaler, one in zip(_states()[0].scalers if _states() else (), state_dict.values(), strict=False):
        scaler.scale, scaler.steps = one["loss_scale"], one["unskipped"]
