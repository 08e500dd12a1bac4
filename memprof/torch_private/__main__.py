"""Prints the private names that the installed torch lacks, as JSON for `memprof doctor --env`: name -> behaviour
without."""

from __future__ import annotations

import json
import sys

from memprof.torch_private.check import expected_names

if __name__ == "__main__":
    names = expected_names()
    missing = {str(name): name.without for name in names if not name.exists()}
    sys.stdout.write(json.dumps({"number": len(names), "missing": missing}) + "\n")
