"""chunked-loss in real models: the same loss, gradients and logits, and a peak that knows nothing of the sequence."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import transformers
from torch.nn import functional

import memprof
from memprof.errors import UsageError
from tests.unit.fixes import models

EPS = 2**-23


def gradients(model):
    found = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def assert_same(model, call, **options):
    """The original, the chunked and a float64 copy of it."""
    reference = copy.deepcopy(model).double()
    exact = call(reference)
    exact.backward()
    loss = call(model)
    loss.backward()
    wanted, theirs = gradients(reference), gradients(model)
    with memprof.apply(model, ["chunked-loss"], **options), warnings.catch_warnings():
        warnings.simplefilter("error")
        chunked = call(model)
        chunked.backward()
    ours = gradients(model)
    assert abs(chunked.double() - exact) <= 2 * abs(loss.double() - exact) + 8 * EPS * abs(exact)
    for name, exact_grad in wanted.items():
        size = float(exact_grad.abs().max())
        error = float((ours[name] - exact_grad).abs().max())
        assert error <= 2 * float((theirs[name] - exact_grad).abs().max()) + 8 * EPS * size, name


EXTRAS = {
    "plain": {},
    "tuples": {"return_dict": False},
    "items": {"num_items_in_batch": 40},
    "items tensor": {"num_items_in_batch": torch.tensor(40)},
    "keep": {"logits_to_keep": 0},
}


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("name", models.MODELS)
def test_same_loss_and_gradients(name, extra):
    batch = models.batch()
    assert_same(models.MODELS[name](), lambda model: model(**batch, **EXTRAS[extra])[0], chunk_size=4)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_handwritten_model(transposed):
    model = models.Handwritten(transposed=transposed)
    batch = models.batch()
    targets = batch["labels"].masked_fill(batch["labels"] == -100, -1)
    assert_same(model, lambda model: model(batch["input_ids"], targets)[1], chunk_size=4)


def test_padding_and_shifted_labels():
    batch = models.batch()
    mask = torch.ones_like(batch["input_ids"])
    mask[1, :4] = 0
    shifted = functional.pad(batch["labels"], (0, 1), value=-100)[..., 1:].contiguous()
    model = models.llama()
    assert_same(model, lambda model: model(**batch, attention_mask=mask).loss, chunk_size=5)
    assert_same(model, lambda model: model(**batch, shift_labels=shifted).loss, chunk_size=5)


def test_gradients_add_up_over_micro_batches():
    def call(model):
        return sum(model(**models.batch(tokens=tokens), num_items_in_batch=50).loss for tokens in (9, 17))

    assert_same(models.gpt2(), call, chunk_size=4)


@pytest.mark.parametrize("size", [1, 12, 26, 10_000])
def test_any_chunk_size(size):
    assert_same(models.gemma2(), lambda model: model(**models.batch()).loss, chunk_size=size)


def test_all_labels_ignored():
    batch = models.batch()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    model = models.llama()
    with memprof.apply(model, ["chunked-loss"], chunk_size=4):
        loss = model(**batch).loss
        loss.backward()
    assert loss.isnan()
    chunked = gradients(model)
    model(**batch).loss.backward()
    theirs = gradients(model)
    assert all(torch.equal(chunked[name], theirs[name]) for name in theirs)


def test_logits_are_there_when_asked_for():
    batch = models.batch()
    model = models.gemma2()
    with torch.no_grad():
        wanted = model(**batch).logits
        with memprof.apply(model, ["chunked-loss"]):
            logits = model(**batch).logits
            assert logits.shape == wanted.shape and logits.dtype == wanted.dtype and logits.device == wanted.device
            # The head of one row alone: a product of another shape, which some CPUs round in another order.
            torch.testing.assert_close(logits[:, -1], wanted[:, -1])
            assert torch.equal(logits.argmax(-1), wanted.argmax(-1))
            assert torch.equal(copy.deepcopy(logits), wanted)
            assert type(model(input_ids=batch["input_ids"]).logits) is torch.Tensor


def test_generation_is_as_before():
    ids = models.batch()["input_ids"]
    model = models.llama(eos_token_id=None).eval()
    wanted = model.generate(ids, max_new_tokens=5, do_sample=False)
    with memprof.apply(model, ["chunked-loss"]):
        assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), wanted)


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_autocast_is_followed(kind):
    model, batch = models.llama(), models.batch()

    def step():
        with torch.autocast("cpu", dtype=getattr(torch, kind)):
            loss = model(**batch).loss
        loss.backward()
        return loss.detach(), gradients(model)

    loss, theirs = step()
    with memprof.apply(model, ["chunked-loss"], chunk_size=4):
        chunked, ours = step()
    torch.testing.assert_close(chunked, loss, rtol=1e-5, atol=0)
    for name in theirs:
        assert float((ours[name] - theirs[name]).abs().max()) <= 2**-6 * float(theirs[name].abs().max()), name


def test_a_copy_of_the_model_is_its_own():
    model = models.llama()
    memprof.apply(model, ["chunked-loss"], chunk_size=4)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert float(twin(**models.batch()).loss.detach()) == pytest.approx(
        torch.tensor(float(models.VOCAB)).log().item(), rel=1e-6
    )


def test_full_logits_inside_the_forward_are_told():
    class Softmaxing(models.Handwritten):
        def forward(self, idx, targets=None):
            logits = self.head(self.embed(idx))
            return functional.nll_loss(logits.log_softmax(-1).flatten(0, 1), targets.flatten())

    model, batch = Softmaxing(), models.batch()
    wanted = model(batch["input_ids"], batch["input_ids"])
    memprof.apply(model, ["chunked-loss"])
    with pytest.warns(UserWarning, match="log_softmax needs the full logits"):
        assert torch.equal(model(batch["input_ids"], batch["input_ids"]), wanted)


@pytest.mark.parametrize("threshold", ["auto", "1GiB", 2 * 13 * models.VOCAB * 4 + 1])
def test_below_the_threshold_nothing_is_chunked(threshold):
    model = models.llama()
    with memprof.apply(model, ["chunked-loss"], threshold=threshold):
        assert type(model(**models.batch()).logits) is torch.Tensor
    with memprof.apply(model, ["chunked-loss"], threshold=2 * 13 * models.VOCAB * 4):
        assert type(model(**models.batch()).logits) is not torch.Tensor


# -- what cannot be done ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"chunk_size": 0}, "at least 1 token"),
        ({"chunk_size": -3}, "at least 1 token"),
        ({"chunk_size": 2.5}, "at least 1 token"),
        ({"chunk_bytes": 0}, "at least 1 bytes"),
        ({"chunk_bytes": "many"}, "not an amount"),
        ({"threshold": -1}, "at least 0 bytes"),
        ({"head": "no.such"}, "no such module"),
        ({"head": "model"}, "no plain torch.nn.Linear"),
    ],
)
def test_bad_options(options, problem):
    model = models.llama()
    before = models.state(model)
    with pytest.raises(UsageError, match=problem):
        memprof.apply(model, ["chunked-loss"], **options)
    assert models.state(model) == before


def test_a_head_with_hooks_is_refused():
    model = models.llama()
    handle = model.lm_head.register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(UsageError, match="has hooks"):
        memprof.apply(model, ["chunked-loss"])
    handle.remove()
    memprof.apply(model, ["chunked-loss"])


def test_models_without_head_or_loss_are_refused():
    with pytest.raises(UsageError, match="no lm_head"):
        memprof.apply(models.llama().model, ["chunked-loss"])

    class NoLabels(models.Handwritten):
        def forward(self, idx):
            return self.head(self.embed(idx))

    with pytest.raises(UsageError, match="computes no loss"):
        memprof.apply(NoLabels(), ["chunked-loss"])


# -- memory ----------------------------------------------------------------------------------------


def peak_above_hidden(tokens: int, **options) -> int:
    """The peak of a step on the virtual GPU, less what grows with the tokens though there were no logits."""
    with memprof.virtual_gpu("h100-80gb") as gpu:
        model = models.Handwritten(vocab=50_000).to("cuda")
        if options:
            memprof.apply(model, ["chunked-loss"], **options)
        ids = torch.zeros(1, tokens, dtype=torch.int64, device="cuda")
        model(ids, ids)[1].backward()
    return gpu.report().peak.allocated_bytes


def test_the_peak_grows_with_the_chunk_and_not_with_the_sequence():
    vocab_bytes = 50_000 * 4
    # Without the fix: logits, their log-softmax and its gradient, each tokens x vocabulary.
    assert peak_above_hidden(8192) - peak_above_hidden(4096) >= 2 * 4096 * vocab_bytes
    small, large = peak_above_hidden(4096, chunk_size=256), peak_above_hidden(8192, chunk_size=256)
    # Twice the tokens: activations of width 32, nothing of the vocabulary's width.
    assert large - small < 4096 * 32 * 4 * 40 < 4096 * vocab_bytes / 20
    more = peak_above_hidden(8192, chunk_size=512)
    assert 256 * vocab_bytes <= more - large <= 4 * 256 * vocab_bytes


def test_chunk_bytes_bound_the_chunk():
    base = peak_above_hidden(8192, chunk_size=32)
    for budget in (64 << 20, 256 << 20):
        assert budget / 4 < peak_above_hidden(8192, chunk_bytes=budget) - base <= budget


@pytest.mark.nightly
def test_autocast_on_the_virtual_gpu():
    """Under autocast the logits' chunks are in half precision, as the logits would be."""

    def peak(**options) -> int:
        with memprof.virtual_gpu("h100-80gb") as gpu:
            model = models.Handwritten(vocab=50_000).to("cuda")
            if options:
                memprof.apply(model, ["chunked-loss"], **options)
            ids = torch.zeros(1, 4096, dtype=torch.int64, device="cuda")
            with torch.autocast("cuda", dtype=torch.bfloat16):
                _, loss = model(ids, ids)
            loss.backward()
        return gpu.report().peak.allocated_bytes

    full, chunked = peak(), peak(chunk_size=256)
    assert full - chunked > 4096 * 50_000 * (2 + 4)
    assert chunked < full / 10


# -- beside other libraries --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapped", ["", "before", "after"])
def test_an_unmodified_trainer(tmp_path, wrapped):
    """Hugging Face's Trainer under bfloat16 autocast with accumulation and evaluation, PEFT around the model or not."""
    peft = pytest.importorskip("peft")

    def losses(chunked: bool) -> list[float]:
        model = models.llama()
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        if wrapped == "before":
            model = peft.get_peft_model(model, config)
        if chunked:
            memprof.apply(model, "chunked-loss", chunk_size=4)
        if wrapped == "after":
            model = peft.get_peft_model(model, config)
        seen = set()
        model.register_forward_hook(lambda module, args, output: seen.add(type(output["logits"]).__name__))
        rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, models.VOCAB, (8, 12)).tolist()]
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3,
            logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, bf16=True, disable_tqdm=True, seed=0,
            learning_rate=1e-2,
        )  # fmt: skip
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.train()
            evaluated = trainer.evaluate()["eval_loss"]
        assert seen == ({"LazyLogits"} if chunked else {"Tensor"})
        return [row["loss"] for row in trainer.state.log_history if "loss" in row] + [evaluated]

    assert losses(True) == pytest.approx(losses(False), rel=1e-5)


@pytest.mark.parametrize("kind", ["bloom", "cohere", "gpt_neox", "gptj", "granite", "phi"])
def test_other_architectures(kind):
    """Scaled logits (cohere, granite), heads of other names (embed_out), heads with a bias (gptj, phi)."""
    config = transformers.CONFIG_MAPPING[kind]()
    small = {
        "hidden_size": 32, "n_embd": 32, "intermediate_size": 64, "num_hidden_layers": 2, "n_layer": 2, "n_head": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97, "rotary_dim": 4, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    }  # fmt: skip
    for name, value in small.items():
        if hasattr(config, name):
            setattr(config, name, value)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    assert_same(model, lambda model: model(**models.batch(), use_cache=False).loss, chunk_size=4)
