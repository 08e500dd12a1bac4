"""Prints the names of JSON that changed, for docs/json.md."""

from memprof.trace.old_names import OLD_NAMES

width = max(map(len, OLD_NAMES)) + 2
print(f"{'before':{width}}  now")
for old, new in OLD_NAMES.items():
    print(f"{f'`{old}`':{width}}  `{new}`")
