"""Program that prints the private names that the installed torch lacks, with their fallbacks, as JSON for
`memprof doctor --env`."""

from __future__ import annotations

import json
import sys

from memprof.torch_private.check import list_expected_names

if __name__ == "__main__":
    names = list_expected_names()
    missing = {str(name): name.fallback for name in names if not name.exists()}
    sys.stdout.write(json.dumps({"number": len(names), "missing": missing}) + "\n")
