"""Remedies: what makes a run smaller, what each costs, and the real thing for a user's own model.

`catalog` is plain Python: names, costs, conflicts. `implementation` needs torch: `memprof.apply` switches remedies on.
"""
