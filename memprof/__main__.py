"""Entry point of `python -m memprof`."""

from memprof.cli.main import run

if __name__ == "__main__":
    run()
