"""`memprof models`: the models of the catalog, which need no network."""

from __future__ import annotations

from memprof.cli.output import ListOptions, print_json
from memprof.cli.streams import echo

EXAMPLES = """
memprof models
memprof models --json
"""


def models(output: ListOptions) -> None:
    """List the catalog's models by family, the newest first: name, parameters, published dtype, positions, Hugging Face
    id."""
    from memprof.units import format_count
    from memprof.workload.catalog import list_models

    if output.as_json:
        from memprof.report.documents.command_results import ModelList

        print_json(ModelList(models=tuple(list_models())))
        return
    family = ""
    for entry in list_models():
        if entry.family != family:
            echo(("\n" if family else "") + entry.family)
            family = entry.family
        positions = f"{entry.max_positions:,}" if entry.max_positions else "-"
        echo(
            f"  {entry.key:<24}{format_count(entry.num_parameters):>9}  {entry.checkpoint_dtype:<9}"
            f"{positions:>10}  {entry.hf_id}"
        )
