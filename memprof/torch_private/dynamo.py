"""Private names of Dynamo and AOTAutograd, which are imported when a program first compiles something."""

from __future__ import annotations

from functools import partial

from memprof.torch_private.names import PrivateName

RUNS_EAGERLY = "torch.compile runs eagerly, and the report's assumptions say so"
_dynamo_name = partial(PrivateName, fallback=RUNS_EAGERLY)

reset = _dynamo_name("torch._dynamo:reset")
config = _dynamo_name("torch._dynamo.config")
functorch_config = _dynamo_name("torch._functorch.config")
allow_in_graph = _dynamo_name("torch._dynamo.decorators:allow_in_graph")

catch_errors = _dynamo_name("torch._dynamo.convert_frame:CatchErrorsWrapper.__call__")
ConvertFrameReturn = _dynamo_name("torch._dynamo.convert_frame:ConvertFrameReturn")
get_and_maybe_log_recompilation_reasons = _dynamo_name(
    "torch._dynamo.convert_frame:get_and_maybe_log_recompilation_reasons"
)
InternalTorchDynamoError = _dynamo_name("torch._dynamo.exc:InternalTorchDynamoError")
Unsupported = _dynamo_name("torch._dynamo.exc:Unsupported")
build_guards = _dynamo_name("torch._dynamo.guards:CheckFunctionManager.__init__")
guard_on_torch_function_state = _dynamo_name("torch._dynamo.guards:GuardBuilder.TORCH_FUNCTION_STATE")
call_user_compiler = _dynamo_name("torch._dynamo.output_graph:OutputGraph.call_user_compiler")
compile_subgraph = _dynamo_name("torch._dynamo.output_graph:OutputGraph.compile_subgraph")
counters = _dynamo_name("torch._dynamo.utils:counters")
run_node = _dynamo_name("torch._dynamo.utils:run_node")
common_constant_types = _dynamo_name("torch._dynamo.utils:common_constant_types")
set_torch_function_mode_stack = PrivateName(
    "torch._dynamo.utils:set_torch_function_mode_stack", fallback="compiled code lays down no stack of modes"
)
ConstantVariable = _dynamo_name("torch._dynamo.variables.constant:ConstantVariable")
type_handlers = PrivateName(
    "torch._dynamo.variables.builder:SourcelessBuilder._type_handlers",
    fallback="properties of the GPU are constants by their type alone",
)
get_handlers = PrivateName(
    "torch._dynamo.variables.torch:TorchInGraphFunctionVariable._get_handlers",
    fallback="handlers are made when they are first requested",
)
OptimizerVariable = _dynamo_name("torch._dynamo.variables.optimizer:OptimizerVariable")
create_stream_context = PrivateName(
    "torch._dynamo.variables.streams:StreamContextVariable.create", fallback="graphs have no streams", since="2.10"
)
enable_compiled_autograd = _dynamo_name("torch._dynamo.compiled_autograd:_enable")

SKIP_DIRS = _dynamo_name("torch._dynamo.trace_rules:SKIP_DIRS")
skip_module = _dynamo_name("torch._dynamo.trace_rules:add")
recompile_re = _dynamo_name("torch._dynamo.trace_rules:_recompile_re")
get_torch_obj_rule_map = _dynamo_name("torch._dynamo.trace_rules:get_torch_obj_rule_map")

# -- what Dynamo asks of the device --------------------------------------------------------------------------------

cuda_exchange_device = _dynamo_name("torch._dynamo.device_interface:CudaInterface.exchange_device")
cuda_maybe_exchange_device = _dynamo_name("torch._dynamo.device_interface:CudaInterface.maybe_exchange_device")
cuda_get_raw_stream = _dynamo_name("torch._dynamo.device_interface:CudaInterface.get_raw_stream")
get_cuda_stream = _dynamo_name("torch._dynamo.device_interface:get_cuda_stream")
caching_worker_device_properties = _dynamo_name("torch._dynamo.device_interface:caching_worker_device_properties")
caching_worker_current_devices = _dynamo_name("torch._dynamo.device_interface:caching_worker_current_devices")

# -- fake and functional tensors, by which graphs are traced -------------------------------------------------------

FakeTensor = _dynamo_name("torch._subclasses.fake_tensor:FakeTensor")
new_fake_tensor = _dynamo_name("torch._subclasses.fake_tensor:FakeTensor.__new__")
is_meta_of_fake_tensor = _dynamo_name("torch._subclasses.fake_tensor:FakeTensor.is_meta")
FakeTensorMode = PrivateName(
    "torch._subclasses.fake_tensor:FakeTensorMode", fallback="fake tensors are not refused, and their cache is kept"
)
from_tensor = PrivateName(
    "torch._subclasses.fake_tensor:FakeTensorMode.from_tensor", fallback="fake tensors are not refused"
)
avoid_device_init = _dynamo_name("torch._subclasses.fake_tensor:FakeTensorMode.avoid_device_init")
init_gpu_context = _dynamo_name("torch._subclasses.fake_tensor:init_gpu_context")
FunctionalTensor = _dynamo_name("torch._subclasses.functional_tensor:FunctionalTensor")
device_of_functional_tensor = _dynamo_name("torch._subclasses.functional_tensor:FunctionalTensor.device")
is_meta_of_functional_tensor = _dynamo_name("torch._subclasses.functional_tensor:FunctionalTensor.is_meta")
FunctionalTensorMode = _dynamo_name("torch._subclasses.functional_tensor:FunctionalTensorMode")
from_functional_tensor = _dynamo_name("torch:_from_functional_tensor")
describe_tensor = _dynamo_name("torch._subclasses.meta_utils:MetaTensorDescriber.describe_tensor")
ensure_cuda_device_guard_set = PrivateName(
    "torch._C:_ensureCUDADeviceGuardSet", fallback="memprof's own is put there all the same", since="2.10"
)
TensorMeta = _dynamo_name("torch._prims:TensorMeta")
rng_prims = _dynamo_name("torch._prims.rng_prims")
suggest_memory_format = _dynamo_name("torch._prims_common:suggest_memory_format")
ConvBackend = _dynamo_name("torch._C:_ConvBackend")
_ON_CPU = "convolutions are traced in the layouts of the CPU"
select_conv_backend = PrivateName("torch._C:_select_conv_backend", fallback=_ON_CPU)
conv_determine_backend_memory_format = PrivateName("torch._C:_conv_determine_backend_memory_format", fallback=_ON_CPU)
