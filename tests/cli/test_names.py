"""One meaning, one option: what an option is called says what it means, in every command."""

from __future__ import annotations

import dataclasses
import importlib
from collections import defaultdict
from typing import get_type_hints

import typer

from memprof.cli.main import COMMANDS, app
from memprof.cli.options import SharedOptions
from memprof.cli.sweep import SweepAxes
from memprof.spec import TargetSpec, get_options

ANOTHER_DEFAULT = {
    ("doctor", "--batch-size"): "the run is over: what is not said is not known",
    ("doctor", "--context-length"): "likewise",
    ("recommend", "--batch-size"): "it is what is searched for",
    ("recommend", "--dtype"): "likewise",
    ("recommend", "--amp"): "likewise",
    ("recommend", "--quantize"): "likewise",
    ("vocab", "--vocab-size"): "the corpus has one of its own",
    ("estimate", "--dtype"): "every dtype is shown, and one is looked at more closely",
    ("estimate", "--new-tokens"): "a prompt alone gives a token already",
    ("estimate", "--gpu"): "a closed form can ask all GPUs",
    ("estimate", "--parallel"): "a closed form can ask several plans",
    ("recommend", "--host-memory"): "what is searched may put much there",
    ("run", "--steps"): "a script may grow for longer than a model",
    ("profile", "--device"): "a model is simulated first, and then measured if it fits; a script is run once",
    ("analyze", "--gpu-index"): "a recording of several GPUs is short enough to be shown in full",
    ("analyze", "--alloc-conf"): "a recorded run had its own",
    ("show", "--alloc-conf"): "likewise",
    ("run", "--gpus"): "a launcher says how many processes it starts",
    ("run", "--rank"): "the others cost as much again",
    ("sweep", "--gpu"): "a grid is not of the machine that asks for it",
    ("sweep", "--fix"): "without fixes is one value of several",
}
LISTS = {("sweep", about.flag) for about in get_options(SweepAxes).values()}
OTHER_CHOICES = {
    ("estimate", "--optimizer"): "adafactor's state has no closed form",
    ("estimate", "--optimizer-impl"): "single and foreach take the same",
    ("estimate", "--quantize"): "mixtures of experts and GGUF have no closed form",
    ("profile", "--device"): "see above",
    ("recommend", "--quantize"): "it quantizes published weights, and looks for no other checkpoint",
}
# What each option means, in a few words. No two may mean the same: a new one stands here beside what it is near to.
CODE_MEANINGS = {
    # What is run.
    "--model": "which model", "--model-size": "the published model of this size", "--params": "a number of parameters",
    "--trust-remote-code": "foreign code may run", "--vocab-size": "rows of the embedding", "-m": "SCRIPT is a module",
    "--torch-release": "by whose rules torch allocates",
    "--attention": "transformers' implementation of attention", "--sdpa-backend": "torch's kernel of attention",
    "--mode": "training or inference", "--evaluate": "a forward without gradients after each step",
    "--tokenizer": "what splits text into tokens", "--encoding": "of text files",
    "--column": "of a table of texts", "--lengths-column": "of a table of lengths",
    # How much of it.
    "--context-length": "tokens of a sequence", "--batch-size": "sequences of a micro-batch",
    "--gradient-accumulation": "micro-batches of a step", "--effective-batch": "sequences of a step",
    "--lengths": "of samples that vary", "--new-tokens": "tokens that are generated",
    "--dataset-batches": "batches in host memory", "--batches": "batches that are tried one after another",
    "--steps": "optimizer steps", "--seeds": "repetitions with other random numbers",
    "--until-exit": "until the script ends by itself", "--timeout": "seconds until a script is stopped",
    "--interval": "seconds between two looks", "--once": "one look", "--worst-batch": "the largest batch comes first",
    "--no-stubs": "packages that are not installed stay missing",
    "--no-compile": "torch.compile runs eagerly", "--compile": "what torch.compile makes of it",
    "--compile-mode": "how torch.compile makes it", "--compile-layers": "torch.compile for each layer",
    # Numbers and their formats.
    "--dtype": "format of parameters and activations", "--amp": "format of autocast", "--quantize": "format of weights",
    "--no-double-quant": "scales of 4-bit weights in float32",
    # What is trained.
    "--optimizer": "which optimizer", "--optimizer-impl": "how it steps", "--zero-grad": "what is left of gradients",
    "--freeze": "parameters that are not trained", "--adapter": "what is trained beside the frozen model",
    "--lora-rank": "of the adapter's matrices", "--lora-targets": "modules with an adapter",
    "--lora-dropout": "before the adapter", "--activation-checkpointing": "activations are computed again",
    "--npt": "a weight delta for each token", "--npt-rank": "of it", "--npt-layers": "where", "--npt-chunk": "tokens",
    "--npt-num-ranks": "updates of rank 1", "--npt-combine": "how they are summed", "--npt-init": "how they begin",
    # What serves it.
    "--engine": "which inference engine", "--engine-release": "of the engine", "--concurrency": "requests at once",
    "--memory-utilization": "fraction of the GPU for an engine", "--kv-cache-dtype": "format of keys and values",
    "--max-num-seqs": "requests of a step of an engine", "--max-loras": "adapters at once",
    "--max-num-batched-tokens": "tokens of a step of an engine",
    "--gguf-type": "format of a GGUF file",
    # On what.
    "--gpu": "which GPU", "--gpu-vram": "a GPU of this capacity", "--gpus": "how many GPUs",
    "--nodes": "how many machines", "--rank": "which of several processes",
    "--parallel": "how a model is spread over GPUs",
    "--ranks": "which of them run together",
    "--host-memory": "what the machine beside the GPU has",
    "--gpu-index": "which GPU of several is shown", "--device": "simulated, or measured where",
    "--detail": "lines of allocations when measured", "--alloc-conf": "the allocator's settings",
    "--no-workspaces": "tensors alone are counted", "--max-memory": "what reading may take",
    "--beyond": "on past a full GPU",
    "--empties-cache": "the program releases what the allocator keeps",
    "--chunked-loss": "the loss is computed some tokens at a time",
    "--present": "the GPUs that are here", "--env": "this installation",
    # What is tried, looked at and compared.
    "--largest": "the number that fits is searched",
    "--executor": "where cells are run", "--workers": "cells that are run at once", "--store": "the folder of answers",
    "--fix": "fixes", "--ladder": "fixes one after another", "--suggest-patch": "a diff of own lines",
    "--exact": "a simulation beside the closed form",
    "--snippet": "a script alone", "--row": "the run in this row of a table",
    "--coverage": "shares of a text", "--cap": "a vocabulary's size to be tried",
    "--at": "which moment", "--by": "what blocks are grouped by", "--replay": "addresses are compared",
    "--tolerance": "by how much totals may differ",
    # What is written, and how.
    "--json": "as JSON", "--csv": "as tables", "--parquet": "as a table of Parquet",
    "--html": "as a page", "--image": "as a picture",
    "--markdown": "as Markdown", "--github": "into a job's summary",
    "--explain": "what it rests on", "--full": "all of a report",
    "--top": "rows of tables", "--save": "a capture is kept", "--to": "a file for another viewer",
    "--log": "a line for each look", "--root": "what an assistant may read",
    "--no-cache": "an earlier answer is not taken", "--clear": "earlier answers are removed",
    "--force": "files of others may be replaced", "--quiet": "the end alone", "--debug": "tracebacks",
    "--no-color": "without colours",
    "--config": "options from a file", "--save-config": "options into a file", "--preset": "options by a name",
    "--help": "help", "--help-all": "help with the rarer options",
    # Of one letter.
    "-q": "--quiet", "-v": "--explain",
}  # fmt: skip


def options():
    """Every option that is made from a field, with its command: name, flag, what is said of it, default."""
    for command in COMMANDS:
        module = importlib.import_module(f"memprof.cli.{command}")
        if hasattr(module, "app"):
            continue
        for kind in get_type_hints(getattr(module, command), include_extras=True).values():
            if dataclasses.is_dataclass(kind):
                for name, about in get_options(kind).items():
                    yield command, about, kind.__dataclass_fields__[name].default


def parameters():
    """The same of every command as click has it, options that are no fields among them."""
    for command, made in typer.main.get_command(app).commands.items():
        for parameter in getattr(made, "commands", {"": made}).values():
            yield from ((command, one) for one in parameter.get_params(typer.Context(parameter)))


def test_an_option_means_the_same_in_all_commands():
    found = defaultdict(list)
    for command, about, default in options():
        found[about.flag].append((command, about, default))
    shared = {about.flag: about.help for kind in (TargetSpec, SharedOptions) for about in get_options(kind).values()}
    different, others = set(), set()
    for flag, uses in found.items():
        help = shared.get(flag, uses[0][1].help)
        command, first, default = uses[0]
        # A list of the same is parsed, and its choices are checked, value by value.
        single = [about for name, about, _ in uses if (name, flag) not in LISTS]
        assert all(about.help.startswith(help) for _, about, _ in uses), flag
        assert len({(about.metavar, about.is_count, about.parse) for about in single}) == 1, flag
        defaults = [(name, about.unset or str(value or None)) for name, about, value in uses]
        usual = max((one for _, one in defaults), key=[one for _, one in defaults].count)
        different |= {(name, flag) for name, one in defaults if one != usual}
        others |= (
            {(name, flag) for name, about, _ in uses if about.choices != first.choices and about in single}
            if len(uses) > 1
            else set()
        )
    assert different == ANOTHER_DEFAULT.keys()
    assert others == OTHER_CHOICES.keys()


def test_no_two_options_mean_the_same():
    flags = {flag for _, one in parameters() if one.param_type_name == "option" for flag in one.opts}
    assert flags == CODE_MEANINGS.keys()
    assert len(set(CODE_MEANINGS.values())) == len(CODE_MEANINGS)


def test_what_several_commands_have_is_made_in_one_place():
    """An option that is not a field is one command's own, but for those that all have."""
    fields = {about.flag for _, about, _ in options()}
    users = defaultdict(set)
    for command, one in parameters():
        if one.param_type_name == "option":
            users[one.opts[-1]].add(command)
    alone = {flag for flag, commands in users.items() if len(commands) > 1} - fields
    assert alone == {"--config", "--debug", "--help", "--help-all", "--no-color", "--preset", "--save-config"}
