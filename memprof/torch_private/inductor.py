"""Private names of Inductor, which is imported when a program first compiles something."""

from __future__ import annotations

from functools import partial

from memprof.torch_private.dynamo import RUNS_EAGERLY
from memprof.torch_private.names import PrivateName

_inductor_name = partial(PrivateName, fallback=RUNS_EAGERLY)

config = _inductor_name("torch._inductor.config")
compile_fx = _inductor_name("torch._inductor.compile_fx:compile_fx")
compile_fx_inner = _inductor_name("torch._inductor.compile_fx:compile_fx_inner")
min_cut_rematerialization_partition = _inductor_name("torch._inductor.compile_fx:min_cut_rematerialization_partition")
compile_to_module = _inductor_name("torch._inductor.graph:GraphLowering.compile_to_module")
deduce_value = _inductor_name("torch._inductor.fx_passes.joint_graph:UniformValueConstantFolder._deduce_value")
compile_triton = _inductor_name("torch._inductor.async_compile:AsyncCompile.triton")
wait = _inductor_name("torch._inductor.async_compile:AsyncCompile.wait")
clone_preserve_strides = _inductor_name("torch._inductor.utils:clone_preserve_strides")
codegen_node = _inductor_name("torch._inductor.codegen.cpp:CppScheduling.codegen_node")
codegen_template = _inductor_name("torch._inductor.codegen.cpp:CppScheduling.codegen_template")
empty_strided_cuda = _inductor_name("torch._C:_dynamo.guards._empty_strided_cuda")
copy_if_misaligned = PrivateName(
    "torch._C:_dynamo.guards.copy_if_misaligned",
    fallback="compiled code copies what is not aligned by itself",
    since="2.13",
)
triton = _inductor_name("torch.utils._triton")
triton_hash_with_backend = _inductor_name("torch.utils._triton:triton_hash_with_backend")

_COMPILER_NOT_CHECKED = "the fix that compiles is offered without asking for a compiler of C++"
get_cpp_compiler = PrivateName("torch._inductor.cpp_builder:get_cpp_compiler", fallback=_COMPILER_NOT_CHECKED)
InvalidCxxCompiler = PrivateName("torch._inductor.exc:InvalidCxxCompiler", fallback=_COMPILER_NOT_CHECKED)

# -- kernels of C++, which `memprof verify` compiles together ------------------------------------------------------

_compilation_name = partial(PrivateName, fallback="`memprof verify` compiles kernels one at a time")
cpp_pybinding = _compilation_name("torch._inductor.async_compile:AsyncCompile.cpp_pybinding")
load_pybinding_async = _compilation_name("torch._inductor.codecache:CppPythonBindingsCodeCache.load_pybinding_async")
LambdaFuture = _compilation_name("torch._inductor.codecache:LambdaFuture")
worker_compile_cpp = _compilation_name("torch._inductor.codecache:_worker_compile_cpp")
get_system = _compilation_name("torch._inductor.codecache:CacheBase.get_system")
torch_key = _compilation_name("torch._inductor.codecache:torch_key")
CppBuilder = _compilation_name("torch._inductor.cpp_builder:CppBuilder")

# Modules that a compilation imports.
MODULES = tuple(
    map(
        partial(PrivateName, fallback="`memprof verify` does not import it before it starts threads and processes"),
        (
            "torch._inductor.compile_fx", "torch._inductor.async_compile", "torch._inductor.codegen.cpp",
            "torch._inductor.codegen.triton", "torch._inductor.codegen.wrapper_fxir", "torch._inductor.codegen.halide",
            "torch._inductor.codegen.pallas", "torch._inductor.codegen.memory_planning",
            "torch._inductor.fx_passes.joint_graph", "torch._inductor.fx_passes.post_grad",
            "torch._inductor.fx_passes.pre_grad", "torch._inductor.compiler_bisector", "torch._export",
        ),
    )
)  # fmt: skip
