"""Who finds a stub, and that nothing of it is left."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import memprof
from memprof.device.catalog import find_gpu
from memprof.errors import MemprofError, UsageError
from memprof.stubs import registry, tools
from memprof.stubs.extension import StubExtension
from memprof.stubs.packages import PACKAGES, PACKAGES_WITHOUT_STUB
from memprof.virtual import VirtualGpu

GPU = find_gpu("h100-80gb")
PROBE = """
try:
    import flash_attn
except ImportError:
    flash_attn = None
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(folder)):
            del sys.modules[name]


def said(gpu: VirtualGpu) -> list[str]:
    return [line for line in gpu.trace.assumptions if " a stub" in line or "looked for" in line]


def test_the_programs_own_import_finds_one_and_nothing_is_left() -> None:
    finders = list(sys.meta_path)
    with VirtualGpu(GPU, extensions=[StubExtension()]) as gpu:
        import flash_attn
        from flash_attn.bert_padding import unpad_input

        assert flash_attn.__version__ == importlib.metadata.version("flash_attn") == "2.8.3"
        assert flash_attn.flash_attn_interface.flash_attn_func is flash_attn.flash_attn_func
        assert callable(unpad_input)
    assert [line.partition(":")[0] for line in said(gpu)] == ["flash_attn is not installed"]
    assert sys.meta_path == finders
    assert not any(name.partition(".")[0] == "flash_attn" for name in sys.modules)
    assert importlib.util.find_spec("flash_attn") is None
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash_attn")


def test_a_stub_that_is_kept_is_refused_after_the_run() -> None:
    with VirtualGpu(GPU, extensions=[StubExtension()]):
        from flash_attn import flash_attn_func
    with pytest.raises(MemprofError, match="no virtual GPU is active"):
        flash_attn_func(*[torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16)] * 3)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_real_package_is_used(packages: Path, package: str) -> None:
    """With each of its modules that have a stub, and as a library looks for it."""
    modules = [name for name in registry.find_modules(package) if name != package]
    for name in [package, *modules]:
        file = packages.joinpath(*name.split("."), "__init__.py")
        file.parent.mkdir(parents=True, exist_ok=True)
        for folder in file.relative_to(packages).parents[:-2]:
            (packages / folder / "__init__.py").touch()
        file.write_text("real = True\n")
    (packages / "library_that_looks.py").write_text(PROBE.replace("flash_attn", package))
    with VirtualGpu(GPU, extensions=[StubExtension()]) as gpu:
        for name in [package, *modules]:
            found = importlib.import_module(name)
            assert found.real, name
            assert str(packages) in str(found.__file__)
        with pytest.raises(ImportError):
            importlib.import_module(f"{package}.no_such_module")
        assert getattr(importlib.import_module("library_that_looks"), package).real
    assert not said(gpu)


def test_a_library_that_looks_is_told_that_there_is_none(gpu: VirtualGpu, packages: Path) -> None:
    (packages / "library_that_looks.py").write_text(PROBE)
    assert importlib.import_module("library_that_looks").flash_attn is None
    assert not said(gpu)


def test_a_library_finds_what_the_program_has_chosen(gpu: VirtualGpu, packages: Path) -> None:
    for name in ("before", "after"):
        (packages / f"{name}.py").write_text(PROBE)
    before = importlib.import_module("before")
    import flash_attn

    assert before.flash_attn is None
    assert importlib.import_module("after").flash_attn is flash_attn
    assert said(gpu)[1].startswith("before looked for flash_attn before the program did, and goes on without it")


def test_the_program_finds_it_where_it_looks_itself(gpu: VirtualGpu, tmp_path: Path) -> None:
    scope: dict[str, object] = {"__name__": "program"}
    exec(compile(PROBE, str(tmp_path / "program.py"), "exec"), scope)
    assert scope["flash_attn"] is not None
    assert said(gpu)


def test_an_installed_package_that_runs_is_the_program(
    gpu: VirtualGpu, packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (packages / "trainer").mkdir()
    (packages / "trainer" / "__init__.py").write_text(PROBE)
    spec = importlib.util.find_spec("trainer")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    assert importlib.import_module("trainer").flash_attn is not None


def test_without_stubs_there_is_none() -> None:
    with memprof.virtual_gpu(stubs=False), pytest.raises(ImportError):
        import flash_attn  # noqa: F401


def test_an_unknown_name_is_imported_and_refused_where_it_is_used(gpu: VirtualGpu) -> None:
    from flash_attn.modules.mha import MHA

    with pytest.raises(MemprofError, match=r"uses flash_attn\.modules\.mha\.MHA, which is not installed") as caught:
        MHA(64, 8)
    assert "memprof help stubs" in str(caught.value)
    assert not isinstance(torch.zeros(1), MHA)
    assert inspect.signature(MHA).parameters  # as decorators of libraries look at it

    class Mine(MHA):  # type: ignore[misc]
        pass

    with pytest.raises(MemprofError, match=r"flash_attn\.modules\.mha\.MHA"):
        Mine(64, 8)
    refused = gpu.unsupported
    assert refused is not None and "flash_attn.modules.mha.MHA" in refused.message


def test_a_name_that_the_real_one_lacks_is_an_import_error(gpu: VirtualGpu) -> None:
    with pytest.raises(ImportError):
        from flash_attn import no_such_function  # noqa: F401
    with pytest.raises(ModuleNotFoundError):
        import flash_attn.no_such_module
    import flash_attn

    with pytest.raises(AttributeError):
        _ = flash_attn.bert_padding  # it has such a module, and does not import it


@pytest.fixture
def made_up_norm() -> Iterator[None]:
    yield
    registry.unregister("made_up_norm")


@pytest.mark.usefixtures("made_up_norm")
def test_anybody_can_add_one() -> None:
    @memprof.stub("made_up_norm.ops.norm", source="me/made_up_norm@v1:norm.cu")
    def norm(x: torch.Tensor) -> torch.Tensor:
        return memprof.kernel(
            lambda x: (torch.empty_like(x), (x, x.new_empty(x.shape[0]))),
            lambda saved, gradient: (torch.empty_like(saved[0]),),
            x,
        )

    with pytest.raises(UsageError, match="two stubs for one name"):
        memprof.stub("made_up_norm.ops.norm", source="another")(norm)
    with pytest.raises(UsageError, match="name in a module"):
        memprof.stub("made_up_norm", source="another")(norm)
    with VirtualGpu(GPU, workspaces=False, extensions=[StubExtension()]) as gpu:
        from made_up_norm import ops
        from made_up_norm.ops import other

        before = torch.cuda.memory_allocated()
        x = torch.zeros(128, 1024, device="cuda", requires_grad=True)
        made = ops.norm(x)
        assert torch.cuda.memory_allocated() - before == 2 * 4 * 128 * 1024 + 4 * 128
        made.backward(torch.ones_like(made))
        assert x.grad is not None and x.grad.shape == x.shape
        with pytest.raises(MemprofError, match=r"made_up_norm\.ops\.other"):
            other(x)
    assert any(
        "made_up_norm is not installed: it is replaced by a stub, by what" in line for line in gpu.trace.assumptions
    )


@pytest.mark.usefixtures("made_up_norm")
def test_a_package_brings_its_own(packages: Path) -> None:
    (packages / "made_up_norm_for_memprof.py").write_text(
        "import memprof\n@memprof.stub('made_up_norm.norm', source='me/made_up_norm@v1:norm.cu')\n"
        "def norm(x):\n    return x.new_empty(x.shape)\n"
    )
    info = packages / "made_up_norm_for_memprof-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: made_up_norm_for_memprof\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[memprof.stubs]\nmade_up_norm = made_up_norm_for_memprof\n")
    registry._load_stubs.cache_clear()
    try:
        with VirtualGpu(GPU, extensions=[StubExtension()]):
            from made_up_norm import norm

            assert norm(torch.zeros(3, device="cuda")).shape == (3,)
    finally:
        registry._load_stubs.cache_clear()


@pytest.mark.parametrize("package", PACKAGES_WITHOUT_STUB)
def test_a_package_without_stub_is_refused_by_name(gpu: VirtualGpu, package: str) -> None:
    with pytest.raises(MemprofError, match=f"imports {package}, which is not installed and has no stub") as refused:
        importlib.import_module(f"{package}.inner")
    assert refused.value.value == package
    assert refused.value.hint is not None and refused.value.hint.startswith("install it ")
    assert isinstance(refused.value, ModuleNotFoundError)  # a program that can do without goes on
    assert importlib.util.find_spec(package) is None
    assert [line for line in gpu.trace.assumptions if line.startswith(f"{package} is not installed and has no")]


def test_a_library_that_looks_for_one_without_stub_goes_on(gpu: VirtualGpu, packages: Path) -> None:
    (packages / "looking.py").write_text(PROBE.replace("flash_attn", "pytorch3d"))
    looking = importlib.import_module("looking")
    assert looking.pytorch3d is None
    assert not [line for line in gpu.trace.assumptions if "pytorch3d" in line]


@pytest.mark.parametrize("package", PACKAGES)
def test_where_the_real_package_can_be_imported_it_is_used(gpu: VirtualGpu, packages: Path, package: str) -> None:
    (packages / f"{package}.py").write_text("here = 'the real one'\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]
    real = importlib.import_module(package)
    assert real.here == "the real one"
    assert str(real.__file__).startswith(str(packages))
    inner = next((module for module in registry.find_modules(package) if "." in module), f"{package}.inner")
    with pytest.raises(ImportError):  # nothing is put into it that it does not have
        importlib.import_module(inner)
    assert not said(gpu)


@pytest.mark.parametrize("package", PACKAGES)
def test_misuse_is_an_error_with_the_name(gpu: VirtualGpu, package: str) -> None:
    """An unknown attribute, submodule or keyword is nobody's guess."""
    module = importlib.import_module(package)
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'made_up_name'"):
        module.made_up_name  # noqa: B018
    with pytest.raises(ImportError, match="made_up_module"):
        importlib.import_module(f"{package}.made_up_module")
    for held in registry.find_modules(package).values():
        for name, one in held.items():
            if not callable(one.value):  # such as a logger
                continue
            takes_any = any(each.kind is each.VAR_KEYWORD for each in inspect.signature(one.value).parameters.values())
            if not takes_any:  # as the real one does
                with pytest.raises((TypeError, MemprofError)) as refused:
                    one.value(made_up_keyword=1)
                assert "made_up_keyword" in str(refused.value) or "argument" in str(refused.value), name


def test_a_package_may_derive_from_what_has_no_stub_and_name_its_members():
    enum = tools.make_placeholder("flashinfer.comm", "AllReduceFusionPattern")
    assert enum.kARResidualRMSNorm is enum.kARResidualRMSNorm
    for used in (enum, enum.kARResidualRMSNorm, type("Derived", (enum,), {})):
        with pytest.raises(MemprofError, match=r"uses flashinfer\.comm\.AllReduceFusionPattern"):
            used()
