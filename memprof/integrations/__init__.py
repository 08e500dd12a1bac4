"""memprof inside other tools: callbacks of trainers, and loggers of experiments (docs/integrations.md).

`steps.py` measures training steps on a GPU; each callback is a thin file on top of it. `loggers.py` writes a report to
Weights & Biases, MLflow and TensorBoard. A file imports the library that it is named after, and nothing else does.
"""
