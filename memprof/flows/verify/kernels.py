"""Compilation of all CPU kernels of a graph in one run of the C++ compiler.

Inductor writes a file for each kernel, and starts the compiler for each. Nearly all of the second that this takes is
the same for every kernel: instantiating templates of Inductor's header, which a precompiled header does not save, and
linking with torch's libraries. Here one file includes the files of all kernels, each in a separate namespace. Compiler,
settings, header and kernel sources are Inductor's, so the machine code is the same. The library is linked into
Inductor's cache under the file name of each kernel, and its module init returns the kernel of the name by which it is
loaded.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memprof.patching import PatchSet
from memprof.torch_private import inductor

# Modules that the first compilation imports.
COMPILER_MODULES = (
    *(name.module for name in inductor.MODULES), "torch.distributed.tensor.experimental",
    "torch.utils.cpp_extension", "sympy.physics.units", "sympy.tensor.tensor",
)  # fmt: skip
_CPP_SUFFIX = ".cpp"
_EMPTY_KERNEL = 'extern "C" void kernel() {}'

# A module with multi-phase initialization (PEP 489): the create slot receives the file name.
_CPP_HEAD = """
static PyObject* of_name(PyObject* spec, PyModuleDef*) {
    PyObject* origin = PyObject_GetAttrString(spec, "origin");
    const char* path = origin ? PyUnicode_AsUTF8(origin) : nullptr;
    PyObject* module = nullptr;
    if (path == nullptr) {}
"""
_CPP_TAIL = """
    else PyErr_Format(PyExc_ImportError, "no kernel of this name: %s", path);
    Py_XDECREF(origin);
    return module;
}
static PyModuleDef_Slot slots[] = {{Py_mod_create, reinterpret_cast<void*>(of_name)}, {0, nullptr}};
static PyModuleDef any_of_them = {
    PyModuleDef_HEAD_INIT, "kernel", nullptr, 0, nullptr, slots, nullptr, nullptr, nullptr
};
PyMODINIT_FUNC PyInit_kernel(void) { return PyModuleDef_Init(&any_of_them); }
"""


@contextlib.contextmanager
def compile_kernels_together() -> Iterator[None]:
    """Context manager: compile all kernels of a graph in one run, also in processes forked inside the context.

    Releases of torch without the patched functions compile as usual.
    """
    queue = _KernelQueue()
    patched_names = (
        inductor.worker_compile_cpp, inductor.cpp_pybinding, inductor.wait, inductor.load_pybinding_async,
        inductor.LambdaFuture, inductor.CppBuilder,
    )  # fmt: skip
    if not all(name.exists() for name in patched_names):
        yield
        return
    wait = inductor.wait.get()

    class Kernel(inductor.LambdaFuture.get()):  # type: ignore[misc]
        """A kernel that is compiled at its first call if `wait` was not called before."""

        def __call__(self, *args: Any) -> Any:
            return self.result()(*args)

    def cpp_pybinding(self: Any, argtypes: list[str], source_code: str) -> Any:
        load = inductor.load_pybinding_async.get()
        return Kernel(load(argtypes, source_code, submit_fn=queue.submit))

    def wait_for_all(self: Any, scope: dict[str, Any]) -> None:
        scope.update({name: value.result() for name, value in scope.items() if isinstance(value, Kernel)})
        wait(self, scope)

    with PatchSet() as patches:
        patches.apply_all([inductor.cpp_pybinding.patch(cpp_pybinding), inductor.wait.patch(wait_for_all)])
        yield


def precompile_header() -> None:
    """Fill Inductor's caches of the compiler, the instruction set and the precompiled header.

    Processes forked afterwards inherit the caches.
    """
    with contextlib.suppress(Exception):  # compiling a kernel later raises the error again
        inductor.load_pybinding_async([], _EMPTY_KERNEL, submit_fn=lambda compile_one: None)
        # Keys of Inductor's caches: hashes of the files of torch and Triton.
        inductor.torch_key()
        inductor.get_system()


class _KernelQueue:
    """A queue of kernels to compile; also the future that Inductor waits on for each kernel."""

    def __init__(self) -> None:
        self._builders: list[Any] = []

    def submit(self, compile_one: Any) -> _KernelQueue:
        """Queue one kernel; `compile_one` is from `CppCodeCache.load_async` (torch/_inductor/codecache.py)."""
        builders = compile_one.args[1]
        # A tuple of one builder; older releases have no tuple, newer ones may split a kernel into several builders.
        builders = builders if isinstance(builders, tuple) else (builders,)
        self._builders += builders if len(builders) == 1 else ()
        return self

    def result(self, timeout: float | None = None) -> None:
        """Compile all queued kernels, with one run of the compiler for those with equal settings."""
        builders, self._builders = self._builders, []
        by_command: dict[str, list[Any]] = {}
        for builder in builders:
            source, target = _get_paths(builder)
            command: str = builder.get_command_line()
            by_command.setdefault(command.replace(source, "").replace(target, ""), []).append(builder)
        for builder_group in by_command.values():
            if len(builder_group) > 1:
                # After a failure Inductor compiles the missing kernels itself, or raises.
                with contextlib.suppress(Exception):
                    _compile_together(builder_group)


def _get_paths(builder: Any) -> tuple[str, str]:
    """Return the paths of a kernel's C++ file and of the library that is compiled from it."""
    target: str = builder.get_target_file_path()
    return str(Path(target).with_suffix(_CPP_SUFFIX)), target


def _compile_together(builders: list[Any]) -> None:
    source_by_target = {target: source for source, target in map(_get_paths, builders)}  # equal kernels are one file
    # In a temporary folder: an interrupted compilation leaves no partial library in Inductor's cache.
    cache_folder = Path(next(iter(source_by_target))).parent
    with tempfile.TemporaryDirectory(prefix="memprof-", dir=cache_folder, ignore_cleanup_errors=True) as folder:
        path = Path(folder, "kernels").with_suffix(_CPP_SUFFIX)
        path.write_text(_join_sources(source_by_target))
        build_option = builders[0]._build_option
        builder = inductor.CppBuilder("kernels", str(path), build_option, output_dir=folder)
        builder.build()
        for target in source_by_target:
            _link_library(builder.get_target_file_path(), target)


def _join_sources(source_by_target: dict[str, str]) -> str:
    """Return the text of a C++ file that includes the files of all kernels."""
    includes: dict[str, None] = {}
    namespaces, cases = [], []
    for index, (target, source) in enumerate(source_by_target.items()):
        # Headers come first, outside the namespaces; include guards skip them inside.
        includes.update(dict.fromkeys(re.findall(r"^ *(#include <.*>)", Path(source).read_text(), re.MULTILINE)))
        namespaces.append(
            f"namespace kernel_{index} {{\n"
            f"#define kernel kernel_{index}_entry\n"
            f"#define PyInit_kernel PyInit_kernel_{index}\n"
            f'#include "{source}"\n'
            "#undef PyInit_kernel\n"
            "#undef kernel\n"
            "}\n"
        )
        name = os.path.basename(target)
        cases.append(f'    else if (strstr(path, "{name}")) module = kernel_{index}::PyInit_kernel_{index}();')
    head = ["#define PY_SSIZE_T_CLEAN", *includes, "#include <cstring>"]
    return "\n".join([*head, *namespaces, _CPP_HEAD.strip("\n"), *cases, _CPP_TAIL.strip("\n")]) + "\n"


def _link_library(library: str, target: str) -> None:
    """Link (or copy) `library` to the path `target`, atomically."""
    try:
        os.link(library, target)
    except FileExistsError:  # compiled before, or by another process
        pass
    except OSError:  # a file system without links
        temporary_path = f"{target}.{os.getpid()}"
        shutil.copy2(library, temporary_path)
        os.replace(temporary_path, target)
