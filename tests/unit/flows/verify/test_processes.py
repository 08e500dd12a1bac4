"""What is there before processes are forked."""

import dataclasses
import sys

from memprof.fixes.catalog import FIXES
from memprof.flows.verify.processes import import_dependencies


def test_packages_of_fixes_are_imported_first(monkeypatch):
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    one = dataclasses.replace(FIXES["lora"], packages=("no_such_package", "wave or colorsys"))
    import_dependencies([one], [])  # it freezes what is there, as every test's fixture does
    assert "wave" in sys.modules
