"""The remedies themselves, on a user's model: `apply` switches them on. Needs torch."""

from memprof.remedies.implementation.applied import Applied, Change, apply

__all__ = ["Applied", "Change", "apply"]
