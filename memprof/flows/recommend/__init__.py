"""`memprof recommend`: what fits a GPU, and the configuration to use. Everything is found by simulated runs."""
