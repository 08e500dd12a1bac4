"""Everything that ten minutes on a machine with a GPU can measure: `make gpu`, or `python -m tests.gpu`.

The day's own files need nothing but Python: `__main__.py` walks through the steps of `steps.py`, each of which starts
programs with a limit (`day.py`, `budget.py`, `process.py`), and packs what they wrote (`packing.py`). The programs are
files of this folder and of tests/accuracy, each in a process of its own.

| step | programs | what it measures |
|---|---|---|
| probe | `probe.py`, `profiler_cost.py` | CUDA context, first use of each library, what torch's profiler costs |
| kineto | `kineto.py` | what torch's profiler and memprof see, against the allocator's history |
| commands | `commands.py` | memprof's own commands on the GPU |
| truth | `tests/accuracy/truth` | the cases of tests/accuracy/cases, allocation by allocation |
| operators | `operators.py` | what each operator requests, on the GPU and on the virtual one |
| scripts | `scripts/` | training scripts: a real snapshot, against the virtual GPU; torch's MemTracker |
| opinfo | `opinfo.py` | torch's operator database, on the GPU and on the virtual one |
| questions | `questions/` | what docs/limitations.md leaves open |
| libraries | `operators.py`, `library_table.py` | workspaces of cuDNN, cuSOLVER, cuFFT and cuSPARSE over many shapes |

The last two have no time left where all steps run: `GPU_DAY_STEPS="questions libraries" make gpu`.
"""
