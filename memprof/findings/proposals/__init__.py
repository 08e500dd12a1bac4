"""Rules that propose changes of the program, one in each file; `memprof.findings.suggestions` shows their effect."""
