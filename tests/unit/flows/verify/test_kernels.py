"""The kernels of a graph in one run of the compiler: the same numbers, and a library under the name of each."""

from __future__ import annotations

import subprocess

import pytest
import torch
import torch._inductor.config as inductor
from torch._inductor import async_compile, codecache, cpp_builder, exc

from memprof.flows.verify.kernels import compile_kernels_together, precompile_header

pytestmark = pytest.mark.slow


def _two_kernels(x, weight):
    """A product ends one, and begins another."""
    x = torch.softmax(x.sin(), -1) @ weight
    return torch.nn.functional.layer_norm(x.exp(), (x.shape[-1],))


def _answer():
    torch._dynamo.reset()
    x = torch.linspace(-2, 2, 17 * 24).view(17, 24).requires_grad_()
    weight = torch.linspace(-1, 1, 24 * 40).view(24, 40)
    result = torch.compile(_two_kernels)(x, weight)
    result.square().sum().backward()
    return result.detach(), x.grad


@pytest.fixture
def runs(monkeypatch):
    """The commands that the compiler was called with for kernels."""
    found, run = [], cpp_builder.run_compile_cmd

    def noting(command, cwd):
        if "kernel" in command or ".main." in command:
            found.append(command)
        run(command, cwd)

    monkeypatch.setattr(cpp_builder, "run_compile_cmd", noting)
    return found


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A function that empties Inductor's cache."""
    number = iter(range(10))

    def empty():
        codecache.CppPythonBindingsCodeCache.cache_clear()
        folder = tmp_path / str(next(number))
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        return folder

    with inductor.patch(compile_threads=1):
        yield empty
    codecache.CppPythonBindingsCodeCache.cache_clear()
    torch._dynamo.reset()


@pytest.mark.nightly
def test_one_run_gives_what_several_give(cache, runs):
    cache()
    one_by_one = _answer()
    apart = len(runs)
    folder, _ = cache(), runs.clear()
    with compile_kernels_together():
        together = _answer()
    assert all(map(torch.equal, one_by_one, together))
    libraries = list(folder.rglob("*.main.so"))
    # Forward and backward are two graphs.
    assert apart == len(libraries) > len(runs) == 2
    assert len({library.stat().st_ino for library in libraries}) == 2
    assert not list(folder.rglob("memprof-*"))


@pytest.mark.nightly
def test_the_next_process_finds_them(cache, runs):
    cache()
    with compile_kernels_together():
        first = _answer()
    runs.clear()
    codecache.CppPythonBindingsCodeCache.cache_clear()
    assert all(map(torch.equal, first, _answer()))
    assert runs == []


@pytest.mark.nightly
def test_where_one_run_fails_each_is_compiled(cache, runs, monkeypatch):
    folder, build = cache(), cpp_builder.CppBuilder.build

    def failing(self):
        if "memprof-" in self.get_target_file_path():
            raise exc.CppCompileError(["g++"], "no room in a namespace")
        build(self)

    monkeypatch.setattr(cpp_builder.CppBuilder, "build", failing)
    with compile_kernels_together():
        _answer()
    assert len(runs) == len(list(folder.rglob("*.main.so"))) > 2


def test_nothing_stays_replaced():
    compiler = async_compile.AsyncCompile
    before = compiler.cpp_pybinding, compiler.wait
    with compile_kernels_together():
        assert compiler.cpp_pybinding is not before[0]
    assert (compiler.cpp_pybinding, compiler.wait) == before


@pytest.mark.nightly
def test_what_each_process_asks_for_is_asked_once(cache, monkeypatch):
    cache()
    precompile_header()
    asked = []
    monkeypatch.setattr(subprocess, "run", lambda command, **options: asked.append(command))
    # What a process that is forked now would ask again: the processor, and the header.
    codecache.CppPythonBindingsCodeCache.load_pybinding_async([], "void other() {}", submit_fn=lambda one: None)
    assert asked == []
