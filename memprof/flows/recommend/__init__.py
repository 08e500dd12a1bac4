"""`memprof recommend`: the configurations that fit a GPU, found by simulated runs."""
