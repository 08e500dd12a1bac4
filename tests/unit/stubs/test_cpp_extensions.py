"""CUDA code that a program compiles itself."""

from __future__ import annotations

import pytest

import memprof
from memprof.device.catalog import find_gpu
from memprof.errors import MemprofError
from memprof.stubs import registry
from memprof.stubs.cpp_extensions import Binding, find_bindings
from memprof.stubs.extension import StubExtension
from memprof.virtual.gpu import VirtualGpu

torch = pytest.importorskip("torch")

OPERATORS = """
#include <torch/extension.h>
void cuda_forward(int B, float *x, float *y);  // no void scores(
void forward(int64_t B, torch::Tensor &x, torch::Tensor &y) { cuda_forward(B, x.data_ptr<float>(), nullptr); }
std::vector<at::Tensor> both(torch::Tensor x) { return {x, x}; }
torch::Tensor scores(torch::Tensor x)
{
    if (x.dim()) { return x.clone(); }
    return scores (x);
}
"""
PYTHON = (
    OPERATORS
    + """
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.def("forward", &forward, "its forward");
    m.def("scores", &mine::scores);
    /* m.def("gone", &forward); */
    m.def("both", both, py::arg("x"));
    m.def("unknown", [](int x) { return x; });
}
"""
)
LIBRARY = (
    OPERATORS
    + """
TORCH_LIBRARY(wkv6, m) {
    m.def("forward", forward);
    m.def("scores(Tensor x) -> Tensor");
    m.def("wkv6::fill(Tensor x, "
          "Tensor(a!) y) -> ()");
}
TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, other) {
    other.def("forward", TORCH_FN(forward));
    other.def("wrapped", WRAP(forward));
}
"""
)


def test_what_the_sources_bind():
    assert list(find_bindings("mine", PYTHON)) == [
        Binding(None, "forward", True),
        Binding(None, "scores", False),
        Binding(None, "both", False),
        Binding(None, "unknown", False),
    ]
    assert list(find_bindings("mine", LIBRARY)) == [
        Binding("wkv6", "forward", True),
        Binding("wkv6", "scores", False),
        Binding("wkv6", "fill", True),
        Binding("mine", "forward", True),
        Binding("mine", "wrapped", False),  # a macro of the program's: what is behind it is not read
    ]
    assert list(find_bindings("mine", OPERATORS, ["forward", "scores"])) == [
        Binding(None, "forward", True),
        Binding(None, "scores", False),
    ]


@pytest.fixture
def gpu():
    with VirtualGpu(find_gpu("h100-80gb"), skips_kernels=True, extensions=[StubExtension()]) as gpu:
        yield gpu


@pytest.fixture
def sources(tmp_path):
    (tmp_path / "op.cpp").write_text(PYTHON)
    (tmp_path / "library.cpp").write_text(LIBRARY)
    (tmp_path / "kernels.cu").write_text("__global__ void kernel() {}")
    return tmp_path


def test_functions_that_return_nothing_are_passed_over(gpu, sources):
    from torch.utils.cpp_extension import load

    mine = load("mine", [str(sources / "op.cpp"), str(sources / "kernels.cu")], extra_cuda_cflags=["-O3"])
    x, y = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")
    held = torch.cuda.memory_allocated()
    assert mine.forward(1, x, y=y) is None
    assert torch.cuda.memory_allocated() == held
    assert any("Functions of mine" in assumption for assumption in gpu.trace.assumptions)


def test_operators_are_there_until_the_run_ends(sources):
    with VirtualGpu(find_gpu("h100-80gb"), skips_kernels=True, extensions=[StubExtension()]):
        from torch.utils.cpp_extension import load

        paths = [str(sources / "library.cpp"), str(sources / "kernels.cu")]
        assert load(name="wkv6", sources=paths, is_python_module=False) is None
        x = torch.zeros(4, device="cuda")
        assert torch.ops.wkv6.forward(1, x, x) is None
        with pytest.raises(MemprofError, match=r"wkv6\.scores, CUDA code"):
            torch.ops.wkv6.scores(x)
    assert not hasattr(torch.ops.wkv6, "forward")


def test_what_returns_something_is_refused_by_name(gpu, sources):
    from torch.utils.cpp_extension import load_inline

    mine = load_inline("mine", [OPERATORS], cuda_sources="__global__ void k() {}", functions=["forward", "scores"])
    x = torch.zeros(4, device="cuda")
    assert mine.forward(1, x, x) is None
    for name in ("scores", "never_bound"):
        with pytest.raises(MemprofError, match=rf"mine\.{name}, CUDA code") as raised:
            getattr(mine, name)(x)
        assert f'@memprof.stub("mine.{name}"' in raised.value.hint


def test_a_stub_says_what_it_returns(gpu, sources):
    from torch.utils.cpp_extension import load

    @memprof.stub("mine.scores", source="here")
    def scores(x):
        return torch.empty(len(x), len(x), device=x.device)

    try:
        mine = load("mine", [str(sources / "op.cpp"), str(sources / "kernels.cu")])
        before = torch.cuda.memory_allocated()
        made = mine.scores(torch.zeros(1024, device="cuda"))
        assert made.shape == (1024, 1024)
        assert torch.cuda.memory_allocated() - before == 1024 * 1024 * 4
    finally:
        registry.unregister("mine")


def test_code_without_cuda_is_built(gpu, tmp_path, monkeypatch):
    from torch.utils import cpp_extension

    asked = []
    monkeypatch.setattr(cpp_extension, "_jit_compile", lambda name, *args, **options: asked.append(name))
    cpp_extension.load("plain", str(tmp_path / "op.cpp"))
    assert asked == ["plain"]
