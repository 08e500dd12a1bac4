"""Events and phases of a run, and the file that keeps them."""
