"""The kernels of a graph for the CPU, compiled in one run of the compiler of C++.

Inductor writes a file for each kernel, and starts the compiler for each. Of the second that takes, nearly all is the
same every time: templates that its own header asks for, which a precompiled header keeps as requested and not as made,
and the linker that reads torch's libraries. Here one file includes those of a graph, each in a namespace of its own.
The compiler, its settings and the header are Inductor's, and so is the text of each kernel: what the processor is told
is the same. The library stands in Inductor's cache under the name of each kernel, and gives the one by whose name it
is loaded.
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

# What the first graph that is compiled imports.
COMPILER_MODULES = (
    *(name.module for name in inductor.MODULES), "torch.distributed.tensor.experimental",
    "torch.utils.cpp_extension", "sympy.physics.units", "sympy.tensor.tensor",
)  # fmt: skip
_CPP = ".cpp"
_NO_KERNEL = 'extern "C" void kernel() {}'

# A module that Python loads in two steps (PEP 489): the first is told from which file.
_HEAD = """
static PyObject* of_name(PyObject* spec, PyModuleDef*) {
    PyObject* origin = PyObject_GetAttrString(spec, "origin");
    const char* path = origin ? PyUnicode_AsUTF8(origin) : nullptr;
    PyObject* module = nullptr;
    if (path == nullptr) {}
"""
_TAIL = """
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
    """Compile the kernels of a graph in one run, inside and in processes that are forked there.

    In a release of torch that compiles otherwise nothing is different.
    """
    waiting = _KernelQueue()
    needed = (
        inductor.worker_compile_cpp, inductor.cpp_pybinding, inductor.wait, inductor.load_pybinding_async,
        inductor.LambdaFuture, inductor.CppBuilder,
    )  # fmt: skip
    if not all(name.exists() for name in needed):
        yield
        return
    wait = inductor.wait.get()

    class Kernel(inductor.LambdaFuture.get()):  # type: ignore[misc]
        """A kernel that is called where nobody has waited for it compiles itself."""

        def __call__(self, *args: Any) -> Any:
            return self.result()(*args)

    def cpp_pybinding(self: Any, argtypes: list[str], source_code: str) -> Any:
        load = inductor.load_pybinding_async.get()
        return Kernel(load(argtypes, source_code, submit_fn=waiting.submit))

    def wait_for_all(self: Any, scope: dict[str, Any]) -> None:
        scope.update({name: value.result() for name, value in scope.items() if isinstance(value, Kernel)})
        wait(self, scope)

    with PatchSet() as patches:
        patches.set_all([inductor.cpp_pybinding.patch(cpp_pybinding), inductor.wait.patch(wait_for_all)])
        yield


def precompile_header() -> None:
    """Find out what each kernel needs: the compiler, what this processor has, the header precompiled.

    A process that is forked after that asks for none of it again.
    """
    with contextlib.suppress(Exception):  # who needs a kernel asks again, and is told
        inductor.load_pybinding_async([], _NO_KERNEL, submit_fn=lambda compile_one: None)
        # The keys of its caches: hashes of torch's own files and of Triton's.
        inductor.torch_key()
        inductor.get_system()


class _KernelQueue:
    """Kernels that wait for the compiler; the future of each of them."""

    def __init__(self) -> None:
        self._waiting: list[Any] = []

    def submit(self, compile_one: Any) -> _KernelQueue:
        """Take what would compile one kernel (`CppCodeCache.load_async`, torch/_inductor/codecache.py)."""
        builders = compile_one.args[1]
        # One; older releases have no tuple, and newer ones may compile a kernel apart from who calls it.
        builders = builders if isinstance(builders, tuple) else (builders,)
        self._waiting += builders if len(builders) == 1 else ()
        return self

    def result(self, timeout: float | None = None) -> None:
        """Compile all kernels that wait, in one run of the compiler."""
        builders, self._waiting = self._waiting, []
        alike: dict[str, list[Any]] = {}
        for builder in builders:
            source, target = _files(builder)
            command: str = builder.get_command_line()
            alike.setdefault(command.replace(source, "").replace(target, ""), []).append(builder)
        for group in alike.values():
            if len(group) > 1:
                # Whatever fails, Inductor compiles what is not there afterwards, or says why it cannot.
                with contextlib.suppress(Exception):
                    _compile(group)


def _files(builder: Any) -> tuple[str, str]:
    """Return the file of C++, and the library that is made of it."""
    target: str = builder.get_target_file_path()
    return str(Path(target).with_suffix(_CPP)), target


def _compile(builders: list[Any]) -> None:
    targets = {target: source for source, target in map(_files, builders)}  # equal kernels are one file
    # A folder of its own: what is interrupted leaves no half a library where Inductor looks for a whole one.
    beside = Path(next(iter(targets))).parent
    with tempfile.TemporaryDirectory(prefix="memprof-", dir=beside, ignore_cleanup_errors=True) as folder:
        path = Path(folder, "kernels").with_suffix(_CPP)
        path.write_text(_text(targets))
        option = builders[0]._build_option
        all_of_them = inductor.CppBuilder("kernels", str(path), option, output_dir=folder)
        all_of_them.build()
        for target in targets:
            _put(all_of_them.get_target_file_path(), target)


def _text(targets: dict[str, str]) -> str:
    """Return one file that includes those of the kernels."""
    includes: dict[str, None] = {}
    parts, cases = [], []
    for number, (target, source) in enumerate(targets.items()):
        # Headers belong into no namespace. Each guards itself from being included again there.
        includes.update(dict.fromkeys(re.findall(r"^ *(#include <.*>)", Path(source).read_text(), re.MULTILINE)))
        parts.append(
            f"namespace kernel_{number} {{\n"
            f"#define kernel kernel_{number}_entry\n"
            f"#define PyInit_kernel PyInit_kernel_{number}\n"
            f'#include "{source}"\n'
            "#undef PyInit_kernel\n"
            "#undef kernel\n"
            "}\n"
        )
        name = os.path.basename(target)
        cases.append(f'    else if (strstr(path, "{name}")) module = kernel_{number}::PyInit_kernel_{number}();')
    head = ["#define PY_SSIZE_T_CLEAN", *includes, "#include <cstring>"]
    return "\n".join([*head, *parts, _HEAD.strip("\n"), *cases, _TAIL.strip("\n")]) + "\n"


def _put(library: str, target: str) -> None:
    """Put `library` under the name of `target` too, at once or not at all."""
    try:
        os.link(library, target)
    except FileExistsError:  # made before, or by another process
        pass
    except OSError:  # a file system without links
        copy = f"{target}.{os.getpid()}"
        shutil.copy2(library, copy)
        os.replace(copy, target)
