"""`memprof models`: the models that need no network."""

from __future__ import annotations

from memprof.catalog import list_models
from memprof.cli.streams import say
from memprof.units import format_count

EXAMPLES = """
memprof models
"""


def models() -> None:
    """List the catalog's models: name, parameters, published dtype, positions, Hugging Face id."""
    for entry in list_models():
        positions = f"{entry.max_positions:,}" if entry.max_positions else "-"
        say(
            f"{entry.key:<24}{format_count(entry.num_parameters):>9}  {entry.checkpoint_dtype:<9}"
            f"{positions:>10}  {entry.hf_id}"
        )
