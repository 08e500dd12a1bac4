"""Speed and memory of memprof itself, each beside the bar that it must clear. Not collected by pytest."""
