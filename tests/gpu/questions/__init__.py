"""Programs that answer a question about a GPU that is open in docs/limitations.md; each prints JSON."""
