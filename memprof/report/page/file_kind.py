"""The kind of file that a page is: apart from page.py, so that `--html` is checked before what builds the page."""

from __future__ import annotations

from memprof.trace.files import FileKind

PAGE_START = "<!DOCTYPE html>\n<!-- a page of memprof -->"
PAGE = FileKind("page", "--html", lambda begin, end: begin.startswith(PAGE_START.encode()))
