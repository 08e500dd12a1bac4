"""What is there before processes are forked."""

import dataclasses
import gc
import sys

from memprof.fixes.catalog import FIXES
from memprof.flows.verify.processes import import_dependencies


def test_packages_of_fixes_are_imported_first(monkeypatch):
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    one = dataclasses.replace(FIXES["lora"], packages=("no_such_package", "wave or colorsys"))
    try:
        import_dependencies([one], [])
    finally:
        gc.unfreeze()
    assert "wave" in sys.modules
