"""Evaluation loops, as programs on the virtual GPU: what stays on the GPU, and graphs that no backward reaches."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import memprof
from memprof.findings import Finding, Severity, find_all
from memprof.units import MIB
from tests.unit.full_gpu import run_out_of_memory

pytestmark = pytest.mark.usefixtures("small_heap")

LOGITS = 512 * 1000 * 4
RULES = ("evaluation-accumulates", "evaluation-with-gradients", "memory-growth")


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1000)).cuda().eval()


def batches(number: int) -> Iterator[torch.Tensor]:
    return (torch.randn(512, 64, device="cuda") for _ in range(number))


def found(program: Callable[[], Any]) -> list[Finding]:
    with memprof.virtual_gpu("h100-80gb") as gpu:
        program()
    return [finding for finding in gpu.report().findings if finding.id in RULES]


class Metric:
    """As metrics of libraries are: they keep what they are given."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def update(self, value: torch.Tensor) -> None:
        self.seen.append(value)


def into_a_list() -> None:
    net, predictions = model(), []
    with torch.no_grad():
        for x in batches(5):
            predictions.append({"logits": net(x)})  # noqa: PERF401


def into_a_metric() -> None:
    net, metric = model(), Metric()
    with torch.inference_mode():
        for x in batches(5):
            metric.update(net(x))


def into_one_tensor() -> None:
    net, predictions = model(), torch.empty(0, 1000, device="cuda")
    with torch.no_grad():
        for x in batches(6):
            predictions = torch.cat([predictions, net(x)])


def a_view_of_them() -> None:
    net, first = model(), []
    with torch.no_grad():
        for x in batches(5):
            first.append(net(x)[:1])  # noqa: PERF401


@pytest.mark.parametrize(
    ("program", "holder", "tensors"),
    [
        (into_a_list, "list `predictions`", 5),
        (into_a_metric, "list `Metric.seen`", 5),
        (into_one_tensor, "variable `predictions`", 5),
        (a_view_of_them, "list `first`", 5),
    ],
)
def test_outputs_that_stay(program: Callable[[], None], holder: str, tensors: int) -> None:
    (finding,) = found(program)
    assert (finding.id, finding.severity) == ("evaluation-accumulates", Severity.WARNING)
    assert f"kept by {holder} (" in finding.title and "1.95 MiB a call" in finding.title
    assert finding.num_bytes == tensors * LOGITS
    assert finding.evidence[1].num_bytes == LOGITS
    assert finding.evidence[-1].text.startswith("fix at ") and ".cpu()" in finding.evidence[-1].text


def without_with() -> None:
    net = model()
    torch.no_grad()  # alone
    outputs = [net(x) for x in batches(10)]
    assert outputs


def test_a_call_of_no_grad_that_is_no_block() -> None:
    (finding,) = found(without_with)
    lines, first = inspect.getsourcelines(without_with)
    line = first + next(number for number, line in enumerate(lines) if "# alone" in line)
    assert f"(it does nothing at findings/test_evaluation.py:{line} without `with`)" in finding.title
    assert finding.evidence[-1].text.startswith(f"fix at findings/test_evaluation.py:{line}: put the calls under")


def test_the_data_loader_says_how_many_there_are() -> None:
    def program() -> None:
        net, predictions = model(), []
        loader = DataLoader(TensorDataset(torch.zeros(100 * 512, 64)), batch_size=512)
        with torch.no_grad():
            for (x,) in itertools.islice(loader, 4):
                predictions.append(net(x.cuda()))

    (finding,) = found(program)
    line = next(line for line in finding.evidence if "data loader" in line.text)
    assert line.num_bytes == 100 * LOGITS and "100 batches" in line.text


def test_the_trainer_of_transformers_is_told_its_own_options(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    def program() -> None:
        ids = {"input_ids": torch.zeros(256, dtype=torch.long), "labels": torch.zeros(256, dtype=torch.long)}
        config = GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=5000, bos_token_id=0, eos_token_id=0)
        options = TrainingArguments(
            str(tmp_path), per_device_eval_batch_size=4, report_to=[], disable_tqdm=True, save_strategy="no"
        )
        trainer = Trainer(GPT2LMHeadModel(config), options, eval_dataset=[ids] * 24, compute_metrics=lambda p: {})
        trainer.evaluate()

    (finding,) = found(program)
    assert finding.id == "evaluation-accumulates" and "`EvalLoopContainer.tensors`" in finding.title
    assert finding.num_bytes is not None and finding.num_bytes >= 5 * 4 * 256 * 5000 * 4
    assert any("the data loader has 6 batches" in line.text for line in finding.evidence)
    assert "preprocess_logits_for_metrics" in finding.evidence[-1].text


def test_gradients_in_evaluation() -> None:
    def program() -> None:
        net = model()
        for x in batches(3):
            net(x).argmax(-1).cpu()

    (finding,) = found(program)
    assert finding.id == "evaluation-with-gradients"
    assert "3 calls of Sequential in eval mode" in finding.title and "test_evaluation.py" in finding.title
    # The first layer's output and the GELU's, and the batch is the caller's.
    assert finding.num_bytes == 2 * 512 * 256 * 4
    assert "5 autograd nodes" in finding.evidence[0].text and "torch.no_grad()" in finding.evidence[-1].text


def test_images_of_a_sampler_that_are_the_next_inputs() -> None:
    def program() -> None:
        net, images = nn.Linear(256, 256).cuda().eval(), []
        image = torch.randn(512, 256, device="cuda")
        with torch.no_grad():
            for _ in range(6):
                image = image - 0.1 * net(image)
                images.append(image)

    (finding,) = found(program)
    assert finding.id == "evaluation-accumulates" and "kept by list `images` (" in finding.title


@pytest.mark.nightly
def test_a_sum_of_losses_that_keeps_the_graphs_of_an_evaluation() -> None:
    """No backward is to come, as it would be for the calls of a training."""

    def program() -> None:
        net, criterion = model(), nn.MSELoss()
        optimizer = torch.optim.SGD(net.parameters())
        for training in (True, False):
            net.train(training)
            losses = 0.0
            for x in batches(4 if training else 400):
                loss = criterion(net(x), torch.zeros(512, 1000, device="cuda"))
                if training:
                    loss.backward()
                    optimizer.step()
                else:
                    losses = losses + loss

    first, *others = find_all(run_out_of_memory(program, 400 * MIB))
    assert first.id == "evaluation-with-gradients" and "kept by variable `losses` (" in first.title
    assert "memory-growth" not in {one.id for one in others}


class Server:
    """Decodes with a KV cache, and has forgotten torch.no_grad()."""

    def __init__(self) -> None:
        shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = transformers.LlamaConfig(**shape, num_key_value_heads=4, vocab_size=1000)
        self.model = transformers.LlamaForCausalLM(config).cuda().eval()

    def answer(self, steps: int) -> torch.Tensor:
        given = answer = torch.randint(0, 1000, (4, 128), device="cuda")
        past = None
        for _ in range(1 + steps):
            out = self.model(input_ids=given, past_key_values=past, use_cache=True)
            past, given = out.past_key_values, out.logits[:, -1:].argmax(-1)
            answer = torch.cat([answer, given], 1)
        return answer


def test_a_cache_of_keys_and_values_that_keeps_the_graph_of_every_token() -> None:
    """The tokens pile up too, and are kept by a variable: they have no graph that could keep anything."""
    (finding,) = found(lambda: Server().answer(16))
    assert finding.id == "evaluation-with-gradients" and "17 calls of LlamaForCausalLM" in finding.title
    assert "kept by" not in finding.title
    texts = [line.text for line in finding.evidence]
    place = texts.index("it piles up from call to call, for the KV cache keeps keys and values with their graph:")
    assert texts[place + 1].startswith("[4 x 4 x 144 x 32] float32 by aten.cat in model.layers.*.self_attn at ")
    assert not any("int64" in text or "`answer`" in text or "outputs are kept" in text for text in texts)


def test_a_cache_that_is_let_go_of_after_each_request_does_not_pile_up() -> None:
    def program() -> None:
        server, answers = Server(), []
        for _ in range(4):
            answers.append(server.answer(4))  # noqa: PERF401

    (finding,) = found(program)
    assert finding.id == "evaluation-with-gradients" and "kept by" not in finding.title
    assert not any("piles up" in line.text or "int64" in line.text for line in finding.evidence)


@pytest.mark.parametrize("is_kept", [True, False])
def test_caches_of_requests_that_are_over(is_kept: bool) -> None:
    def program() -> None:
        server, history = Server(), []
        for _ in range(16):
            prompt = torch.randint(1, 1000, (4, 128), device="cuda")
            options = {"attention_mask": torch.ones_like(prompt), "pad_token_id": 0, "return_dict_in_generate": True}
            output = server.model.generate(prompt, max_new_tokens=2, **options)
            history.append(output if is_kept else output.sequences.tolist())

    findings = found(program)
    assert len(findings) == is_kept
    for finding in findings:
        assert finding.id == "evaluation-accumulates" and "kept by list `history`" in finding.title
        assert finding.title.startswith("KV caches and outputs of 32 calls of LlamaForCausalLM")
        assert "drop the KV cache of each call" in finding.evidence[-1].text


def test_predictions_that_pile_up_beside_gradients_have_no_graph() -> None:
    def program() -> None:
        net, masks = model(), []
        for x in batches(5):
            masks.append(net(x).detach() > 0)  # noqa: PERF401

    (finding,) = found(program)
    assert finding.id == "evaluation-with-gradients" and "kept by list `masks`" in finding.title
    texts = [line.text for line in finding.evidence]
    assert "it piles up from call to call, kept without a graph:" in texts
    assert not any("with their graph" in text for text in texts)


class Doubled(torch.autograd.Function):
    """A kernel of a library."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class WithTable(nn.Module):
    """Keeps a table from one call to the next, as rotary embeddings do, and calls a kernel of a library."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(64, 64)
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table = torch.arange(64 << 10, device="cuda").float()
        return Doubled.apply(self.proj(x) + self.table[:64])


class Wrapped(nn.Module):
    """Returns what is no tuple or dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model()

    def forward(self, x: torch.Tensor) -> Any:
        return types.SimpleNamespace(logits=self.inner(x))


def test_a_graph_behind_an_output_of_a_class_of_its_own() -> None:
    def program() -> None:
        net = Wrapped().cuda().eval()
        for x in batches(3):
            net(x).logits.argmax(-1).cpu()

    (finding,) = found(program)
    assert finding.id == "evaluation-with-gradients" and finding.num_bytes == 512 * (2 * 256 + 1000) * 4


class TestSilentOn:
    """What is as it should be."""

    @pytest.mark.parametrize("where", ["around", "inside"])
    @pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
    def test_a_function_of_a_library_without_gradients(self, where: str, off: Callable[[], Any]) -> None:
        """torch.autograd.Function makes a node even here."""

        def program() -> None:
            net = WithTable().cuda().eval()
            net.forward = off()(net.forward) if where == "inside" else net.forward
            for x in batches(3):
                with off() if where == "around" else contextlib.nullcontext():
                    net(x)

        assert not found(program)

    def test_a_cache_that_grows_with_its_answer(self) -> None:
        assert not found(lambda: torch.no_grad()(Server().answer)(16))

    def test_without_gradients_in_autocast(self) -> None:
        """The half copies of the weights are made with a gradient even here, for the rest of the region."""

        def program() -> None:
            net = model()
            for x in batches(3):
                with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
                    net(x)

        assert not found(program)

    @pytest.mark.parametrize("keep", ["cpu", "argmax", "last", "two"])
    def test_loops_that_keep_little(self, keep: str) -> None:
        def program() -> None:
            net, kept, before = model(), [], None
            with torch.no_grad():
                for x in batches(6):
                    out = net(x)
                    if keep == "two":
                        before = out  # noqa: F841
                    elif keep != "last":
                        kept.append(out.cpu() if keep == "cpu" else out.argmax(-1))

        assert not found(program)

    def test_a_cache_of_keys_and_values(self) -> None:
        class Decoder(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.proj = nn.Linear(512, 512)
                self.joined: torch.Tensor | None = None
                self.parts: list[torch.Tensor] = []

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                key = self.proj(x)
                self.joined = key if self.joined is None else torch.cat([self.joined, key], 1)
                self.parts.append(self.proj(x))
                return self.joined.mean(1, keepdim=True)

        def program() -> None:
            decoder = Decoder().cuda().eval()
            x = torch.randn(64, 1, 512, device="cuda")
            with torch.no_grad():
                for _ in range(9):
                    x = decoder(x)

        assert not found(program)
