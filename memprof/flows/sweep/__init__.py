"""`memprof sweep`: a grid of configurations, answered with as few runs as are needed, by any executor."""
