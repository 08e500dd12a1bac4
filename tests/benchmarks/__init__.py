"""Speed and memory of memprof itself, each beside the bar that it must clear. Not collected by pytest."""

import os

os.environ["MEMPROF_CACHE"] = "off"  # what is measured is run
