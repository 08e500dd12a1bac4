"""`memprof run --suggest-patch`: a diff of the program's own file that takes away the cause of a finding.

`suggest.py` has the flow, `edit.py` chooses the function that makes an edit; `source.py` is the text that they change.
"""
