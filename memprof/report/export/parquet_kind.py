"""The kind of file that a Parquet table is: apart from parquet.py, so that `--parquet` is checked before the work."""

from memprof.trace.files import FileKind

# The format says nothing of who wrote a file that is quick to read: pandas' metadata, near the end, is taken for it.
PARQUET = FileKind("table", "--parquet", lambda begin, end: begin.startswith(b"PAR1") and b'"run_seconds"' in end)
