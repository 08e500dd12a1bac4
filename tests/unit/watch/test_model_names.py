"""transformers' packages have the names that they have without memprof, though they read them late."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.nightly
def test_names_are_read_when_one_is_asked_for():
    code = """
    import sys
    from memprof.watch import model_names
    from memprof.watch.imports import watch_imports
    from memprof.watch.patches import Patches

    name = "transformers.utils.import_utils"
    patches, read = Patches(), []

    def replace():
        utils = sys.modules[name]
        plain = utils.define_import_structure
        utils.define_import_structure = lambda *args, **kwargs: read.append(args[0]) or plain(*args, **kwargs)
        patches.set_all(model_names.patches(utils))

    with watch_imports({name: replace}):
        import transformers
        import transformers.models.gpt2.configuration_gpt2
        from transformers.models import llama

        assert transformers.__version__ and transformers.models.qwen3.__name__ == "transformers.models.qwen3"
        assert transformers.PretrainedConfig.__module__ == "transformers.configuration_utils"
        folders = [str(path).removesuffix("__init__.py").rstrip("/").rpartition("/")[2] for path in read]
        assert folders and "models" not in folders, folders
    patches.undo()

    import_utils = sys.modules[name]
    models = transformers.models.__path__[0]
    for package, prefix in ((transformers, "models"), (transformers.models, None)):
        expected = {
            each for modules in import_utils.define_import_structure(models, prefix).values()
            for names in modules.values() for each in names
        }
        assert len(expected) > 3000 and expected <= set(package.__all__) and expected <= set(dir(package))
    assert transformers.GPT2Config is transformers.models.gpt2.configuration_gpt2.GPT2Config
    assert transformers.AutoConfig.for_model("gpt2").model_type == "gpt2"
    for wrong in (lambda: transformers.nothing, lambda: transformers.models.nothing, lambda: llama.nothing):
        try:
            wrong()
        except AttributeError as error:
            assert "nothing" in str(error)
        else:
            raise AssertionError
    """
    _run(code)


@pytest.mark.nightly
def test_the_folder_by_whose_name_one_begins_defines_it_alone():
    _run("""
    import transformers
    from memprof.watch.model_names import _package_of

    found = 0
    for name, module in transformers._class_to_module.items():
        package = _package_of(name)
        if package is not None:
            path = f"{package.__name__}.{package._class_to_module[name]}"
            assert path.endswith(module) or path == f"transformers.{module}", (name, path, module)
            found += 1
    assert found > 3000, found
    assert _package_of("BloomPreTrainedModel") is transformers.models.bloom
    assert _package_of("PreTrainedModel") is None and _package_of("Llama") is None and _package_of("") is None
    """)


@pytest.mark.nightly
def test_a_name_is_had_without_reading_the_others():
    _run("""
    from memprof.watch.model_names import unread

    with unread():
        from transformers import AutoModelForCausalLM, BloomPreTrainedModel
        import transformers
    assert "_unread" in vars(transformers) and "_unread" in vars(transformers.models)
    from transformers.models.bloom import modeling_bloom
    assert BloomPreTrainedModel is modeling_bloom.BloomPreTrainedModel
    import transformers.utils.import_utils as utils
    assert "memprof" not in utils.define_import_structure.__module__ and "memprof" not in utils._LazyModule.__module__
    assert "LlamaForCausalLM" in dir(transformers) and "_unread" not in vars(transformers)
    assert AutoModelForCausalLM is transformers.AutoModelForCausalLM
    """)


@pytest.mark.nightly
def test_packages_that_are_there_stay_as_they_are():
    """transformers/processing_utils.py makes its package once more, with the class that others imported long ago."""
    _run("""
    import memprof, transformers

    with memprof.virtual_gpu("a100-80gb"):
        import transformers.processing_utils
    assert transformers.AutoConfig.for_model("gpt2").model_type == "gpt2"
    from transformers import AutoModel
    """)


def _run(code: str) -> None:
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
