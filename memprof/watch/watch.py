"""Base class that observes a program on any device: its phases, models, backward passes and optimizer steps."""

from __future__ import annotations

import contextlib
import functools
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from memprof.patching import PatchSet
from memprof.torch_private import autograd, tensors
from memprof.trace.events import MovedModel, Owner, Phase, PhaseKind, Role, Trace
from memprof.watch import zero
from memprof.watch.failure import OUT_OF_MEMORY_ERRORS
from memprof.watch.first_steps import list_first_steps
from memprof.watch.graph import collect_nodes, find_node
from memprof.watch.modules import ModuleTracker, strip_compile_wrapper
from memprof.watch.phases import Phases
from memprof.watch.wrappers import has_memory

# Phases in which a program may build a model.
_BUILDING_PHASES = (PhaseKind.MODEL, PhaseKind.OTHER, PhaseKind.OPTIMIZER)
# Name of the attribute in which an exception stores the phase that raised it. (A table of exceptions would keep their
# tensors alive.)
_PHASE_ATTRIBUTE = "_memprof_phase"
_MOVED_MODEL_ATTRIBUTE = "_memprof_moved_model"
_MAX_INPUT_NODES = 16  # autograd nodes of an input that a program makes of tensors that require gradients
_INPUTS = slice(4, 5)  # argument of autograd's engine: the tensors to whose gradients a backward pass is limited


class Watch(ABC):
    """Observer of the program that runs on a device; the common base of simulated and measured devices.

    It installs patches and hooks on torch, and calls the abstract methods when a phase begins (`begin_phase`) or when a
    tensor's role becomes known (`set_owner`). Subclasses also record allocations.
    """

    def __init__(self) -> None:
        self.modules = ModuleTracker()
        self.modules.on_root = self.adopt
        self.modules.on_outermost_call = self._handle_outermost_call
        # Phases of a program that does not name its phases.
        self.phases = Phases(self._begin_recognized_phase, lambda: self.current_phase)
        self._patches = PatchSet()
        self.phases.on_error = self._record_failed_phase
        self.phases.on_step_error = self._name_optimizer_state
        self.phases.set_patch = self._patches.set
        # Called with the results of a backward pass that gives gradients to all parameters, and after it.
        self.on_backward_begin: Callable[[Iterable[torch.Tensor]], None] = lambda results: None
        self.on_backward_end: Callable[[], None] = lambda: None
        self.modules.on_outermost_raise = self.phases.record_forward_error
        self._stack = contextlib.ExitStack()
        self._assumptions: dict[str, None] = {}
        self._roots: list[weakref.ref[nn.Module]] = []  # the run's models, weakly referenced
        # Modules with a registered weight, by the module's `id` and the weight's name.
        self._registered_weights: dict[tuple[int, str], tuple[weakref.ref[nn.Module], Role]] = {}

    @property
    @abstractmethod
    def current_phase(self) -> Phase:
        """Return the phase that is running."""

    @abstractmethod
    def begin_phase(self, kind: PhaseKind, step: int, micro_batch: int) -> None:
        """Begin a phase, to which later events belong. `step` and `micro_batch` count from 1; 0 means none."""

    @abstractmethod
    def set_owner(self, tensor: torch.Tensor, owner: Owner) -> None:
        """Give `tensor` the role and name of `owner`."""

    @abstractmethod
    def mark_input(self, tensor: torch.Tensor) -> None:
        """Give `tensor`, an argument of a model call, the role INPUT, unless code of a model allocated it."""

    def get_quantized_parts(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the inner tensors (data, scales) of a quantized `tensor`; an empty list for an ordinary tensor."""
        return []

    def wrap_module_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the replacement for `nn.Module.__call__`."""
        return self.modules.wrap_call(original)

    @contextlib.contextmanager
    def phase(self, kind: PhaseKind, step: int = 0, micro_batch: int = 0) -> Iterator[None]:
        """Context manager: run the body as the given phase, with the automatic recognition of phases switched off."""
        was_recognizing, self.phases.is_recognizing = self.phases.is_recognizing, False
        before = self.current_phase
        self.begin_phase(kind, step, micro_batch)
        try:
            yield
        except BaseException as error:
            self._record_failed_phase(error)
            raise
        finally:
            self.phases.is_recognizing = was_recognizing
            self.begin_phase(*before)

    def adopt(self, root: nn.Module) -> None:
        """Add `root` to the models of this run; its parameters and buffers get their roles and names."""
        if not any(root_ref() is root for root_ref in self._roots):
            self._roots.append(weakref.ref(root))
        self.modules.add_root(root)
        self._name_parameters()

    def assume(self, sentence: str) -> None:
        """Add `sentence` to the run's assumptions, once."""
        self._assumptions.setdefault(sentence)

    def find_error_phase(self, error: BaseException) -> Phase:
        """Return the phase in which `error` was raised; the current phase if `error` was raised in it."""
        phase: Phase = vars(error).get(_PHASE_ATTRIBUTE, self.current_phase)
        return phase

    def _write_facts(self, trace: Trace) -> None:
        """Write into `trace` the run's assumptions, whether the program trained, and whether by manual updates."""
        trace.assumptions = list(self._assumptions)
        trace.trains = self.phases.trains
        trace.updates_parameters_manually = self.phases.updates_parameters_manually

    def _record_what_was_to_come(
        self, trace: Trace, error: BaseException | None, get_index: Callable[[torch.Tensor], int]
    ) -> None:
        """Write into `trace`, which the out-of-memory `error` ended, the model that it kept from being moved, and what
        optimizers without a step still make; `get_index` returns a tensor's storage, or NONE."""
        with torch.DisableTorchFunction():
            trace.moved_model = None if error is None else vars(error).get(_MOVED_MODEL_ATTRIBUTE)
            trace.first_steps = list(list_first_steps(self.phases.list_optimizers_without_step(), get_index))

    def _watch_program(self) -> None:
        """Install the patches and hooks that observe the program."""
        self._patches.apply_all(self.phases.patches())
        for name, patches in {
            **self.phases.make_import_patches(),
            **zero.make_import_patches(self.phases, self.set_owner),
        }.items():
            self._patches.apply_on_import(name, patches)
        self._patches.set(nn.Module, "__call__", self.wrap_module_call(nn.Module.__call__))
        self._patch_moves()
        for register, role in (
            (register_module_parameter_registration_hook, Role.PARAMETER),
            (register_module_buffer_registration_hook, Role.BUFFER),
        ):
            self._stack.callback(register(functools.partial(self._record_registered_weight, role)).remove)
        self._patch_backward()
        # Registered before the hooks of `phases`, whose callback at a step's end may end the run.
        self._stack.callback(register_optimizer_step_post_hook(self._name_optimizer_state).remove)
        for handle in self.phases.register_optimizer_hooks():
            self._stack.callback(handle.remove)

    def _begin_recognized_phase(self, kind: PhaseKind, step: int, micro_batch: int) -> None:
        """Begin a recognized phase of a program that does not name its phases."""
        self.begin_phase(kind, step, micro_batch)

    @property
    def _is_recognizing_calls(self) -> bool:
        """Return whether phases are recognized automatically, and no backward pass is running."""
        return self.phases.is_recognizing and autograd.current_graph_task_id() == -1

    def _handle_outermost_call(self, module: nn.Module, index: int, args: Any, kwargs: Any) -> None:
        self.phases.record_forward_call(module)
        if self._is_recognizing_calls and next(module.parameters(), None) is not None:  # a loss has none
            with torch.DisableTorchFunction():
                self._mark_inputs((*args, *kwargs.values()))

    def _mark_inputs(self, values: Iterable[Any]) -> None:
        """Mark as inputs the tensors in `values`, nested containers included, except parameters and what is computed of
        them."""
        for value in values:
            if isinstance(value, (list, tuple)):
                self._mark_inputs(value)
            elif isinstance(value, dict):
                self._mark_inputs(value.values())
            elif isinstance(value, torch.Tensor) and has_memory(value) and not _is_made_of_weights(value):
                self.mark_input(value)

    def _record_failed_phase(self, error: BaseException) -> None:
        vars(error).setdefault(_PHASE_ATTRIBUTE, self.current_phase)  # the innermost phase knows best

    def _patch_moves(self) -> None:
        """Patch `nn.Module._apply` to set the roles of weights of moved modules, even if these are never called."""
        original = tensors.apply_of_module.get()
        is_inside = False

        def _apply(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            nonlocal is_inside
            if is_inside:
                return original(module, *args, **kwargs)
            is_inside = True
            try:
                return original(module, *args, **kwargs)
            except OUT_OF_MEMORY_ERRORS as error:
                vars(error)[_MOVED_MODEL_ATTRIBUTE] = _describe_moved_model(module)
                raise
            finally:
                is_inside = False
                self._set_role(module.parameters(), Role.PARAMETER)
                self._set_role(module.buffers(), Role.BUFFER)

        self._patches.set(*tensors.apply_of_module.patch(_apply))

    def _record_registered_weight(self, role: Role, module: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
        """Remember a weight registered in `module`, so that it gets its role even if `module` is never called."""
        if tensor is not None and self.current_phase.kind in _BUILDING_PHASES:
            # No weak reference to the tensor: torch.utils.swap_tensors, as in sharding, refuses tensors that have one.
            self._registered_weights[id(module), name] = weakref.ref(module), role

    def _set_registered_roles(self) -> None:
        """Set the roles of all weights that modules have registered, called or not, and of what optimizers have loaded
        before their first step; used when the run may end."""
        for (_, name), (module_ref, role) in list(self._registered_weights.items()):
            module = module_ref()
            weights = {} if module is None else module._parameters if role is Role.PARAMETER else module._buffers
            tensor = weights[name] if name in weights else None  # noqa: SIM401, a ScriptModule's are no dictionary
            if tensor is not None:
                self._set_role([tensor], role)
        for optimizer in list(self.phases.optimizers):
            self._set_roles_of_state(optimizer)

    def _patch_backward(self) -> None:
        original = autograd.engine_run_backward_of_graph.get()

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            is_nested = autograd.current_graph_task_id() != -1
            leaves: list[torch.Tensor] = []
            is_into_all = not is_nested and kwargs.get("accumulate_grad", False) and not any(args[_INPUTS])
            if is_into_all:
                self.on_backward_begin(args[0])
            if not is_nested:
                self.phases.record_backward_begin()
                if not self._roots and not self.phases.optimizers and kwargs.get("accumulate_grad"):
                    leaves = _find_leaf_tensors(args[0])
            on_end = self.phases.resume_phase
            try:
                result = original(*args, **kwargs)
                accumulates = kwargs.get("accumulate_grad", False)
                on_end = functools.partial(self.phases.record_backward_end, accumulates=accumulates)
                return result
            except BaseException as error:
                self._record_failed_phase(error)
                raise
            finally:
                if is_into_all:
                    self.on_backward_end()
                if not is_nested:
                    self._name_parameters()
                    self._set_role(leaves, Role.PARAMETER)
                    self._set_role((leaf.grad for leaf in leaves if leaf.grad is not None), Role.GRADIENT)
                    on_end()

        self._patches.set(*autograd.engine_run_backward.patch(run_backward))

    def _set_role(self, tensors: Iterable[torch.Tensor], role: Role) -> None:
        """Give `tensors`, and the inner tensors of quantized ones, the role `role`, without a name."""
        for tensor in tensors:
            for part in (tensor, *self.get_quantized_parts(tensor)):
                self.set_owner(part, Owner(role, ""))

    def _name_parameters(self) -> None:
        """Set the roles and names of parameters, gradients and buffers of the run's models and optimizers."""
        with torch.DisableTorchFunction():  # each attribute that is read would pass through the program's modes
            for optimizer in self.phases.optimizers:
                for group in optimizer.param_groups:
                    self._set_role(group["params"], Role.PARAMETER)
                    self._set_role((p.grad for p in group["params"] if p.grad is not None), Role.GRADIENT)
            for root in [root for root_ref in self._roots if (root := root_ref()) is not None]:
                for full_name, parameter in root.named_parameters():
                    name = strip_compile_wrapper(full_name)
                    for part in (parameter, *self.get_quantized_parts(parameter)):
                        self.set_owner(part, Owner(Role.PARAMETER, name))
                    if (shard := getattr(parameter, "ds_tensor", None)) is not None:  # a rank's part (zero.py)
                        self.set_owner(shard, Owner(Role.PARAMETER, ""))
                    if parameter.grad is not None:
                        self.set_owner(parameter.grad, Owner(Role.GRADIENT, name))
                for name, buffer in root.named_buffers():
                    self.set_owner(buffer, Owner(Role.BUFFER, strip_compile_wrapper(name)))

    def _name_optimizer_state(self, optimizer: Optimizer, *hook_args: Any) -> None:
        """Set the roles of the parameters, gradients and state of `optimizer` after a step, even if the step raised.

        The parameters may not be the model's: during a step, DeepSpeed's optimizers have DeepSpeed's float32 copies.
        """
        for group in optimizer.param_groups:
            self._set_role(group["params"], Role.PARAMETER)
            self._set_role((p.grad for p in group["params"] if p.grad is not None), Role.GRADIENT)
        self._set_roles_of_state(optimizer)

    def _set_roles_of_state(self, optimizer: Optimizer) -> None:
        """Set the role of each tensor in the state of `optimizer`."""
        for state in optimizer.state.values():
            for key, value in state.items():
                for tensor in value if isinstance(value, list) else [value]:  # LBFGS keeps lists of directions
                    if isinstance(tensor, torch.Tensor):
                        for part in self.get_quantized_parts(tensor) or [tensor]:
                            self.set_owner(part, Owner(Role.OPTIMIZER_STATE, str(key)))

    def _stop_watching(self) -> None:
        try:
            self._stack.close()
        finally:
            self._patches.undo()
            self._roots.clear()


def _is_made_of_weights(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is a parameter or may be computed of some, to which a long graph may lead.

    The coordinates of a physics-informed network require gradients, and are joined or scaled before its call.
    """
    if find_node(tensor) is None:
        return isinstance(tensor, nn.Parameter)
    nodes = collect_nodes([tensor], _MAX_INPUT_NODES)
    leaves = [node.variable for node in nodes if hasattr(node, "variable")]
    return len(nodes) == _MAX_INPUT_NODES or any(isinstance(leaf, nn.Parameter) for leaf in leaves)


def _find_leaf_tensors(results: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the leaf tensors that would get gradients in a backward pass from `results`."""
    pending: list[Any] = [find_node(result) for result in results]
    seen: set[Any] = {None}
    leaves = []
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):
                leaves.append(node.variable)
            pending += [next_node for next_node, _ in node.next_functions]
    return leaves


def _describe_moved_model(module: nn.Module) -> MovedModel:
    with torch.DisableTorchFunction():
        parameters = dict(module.named_parameters())
        num_bytes = Counter[str]()
        for tensor in (*parameters.values(), *module.buffers()):
            num_bytes[str(tensor.dtype).removeprefix("torch.")] += tensor.numel() * tensor.element_size()
        (dtype, _), *_ = num_bytes.most_common(1) or [("float32", 0)]
        count = sum(parameter.numel() for parameter in parameters.values())
        model = MovedModel(type(module).__name__, count, num_bytes.total(), dtype)
        if not parameters:
            return model
        name, largest = max(parameters.items(), key=lambda item: item[1].numel() * item[1].element_size())
        largest_bytes = largest.numel() * largest.element_size()
        return model._replace(largest=name, largest_shape=tuple(largest.shape), largest_bytes=largest_bytes)
