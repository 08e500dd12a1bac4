"""What the traceback says of the program: its activity, its script, and the advice that follows."""

from __future__ import annotations

import io

import pytest

from memprof.doctor import Diagnosis, diagnose
from memprof.doctor.activity import Activity, find_activity, list_call_advice
from memprof.doctor.reported_run import find_arguments
from memprof.doctor.tracebacks import TracebackFrame, find_script

LIBRARY = "/opt/venv/lib/python3.12/site-packages"
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 128.00 MiB. GPU 0 has a total capacity of 15.77 GiB "
    "of which 60.00 MiB is free. Of the allocated memory 14.90 GiB is allocated by PyTorch, and 10.00 MiB is reserved "
    "by PyTorch but unallocated.\n"
)
CHECKPOINTING = "activation-checkpointing"
Frame = tuple[str, str, str]


def failed(*frames: Frame, before: str = "", error: str = OOM) -> Diagnosis:
    lines = "".join(f'  File "{file}", line 7, in {name}\n    {code}\n' for file, name, code in frames)
    text = f"{before}Traceback (most recent call last):\n{lines}{error}"
    return diagnose(io.BytesIO(text.encode()), "log")[0]


def parsed(*frames: Frame) -> list[TracebackFrame]:
    return [TracebackFrame(file, 7, name, code) for file, name, code in frames]


SCRIPT = ("/w/train.py", "<module>", "main()")


@pytest.mark.parametrize(
    ("frames", "activity"),
    [
        ([SCRIPT], Activity.UNKNOWN),
        ([SCRIPT, ("/w/train.py", "main", "loss.backward()")], Activity.BACKWARD),
        ([SCRIPT, ("/w/train.py", "main", "self.optimizer.step()")], Activity.OPTIMIZER),
        ([SCRIPT, ("/w/train.py", "main", "scheduler.step()")], Activity.UNKNOWN),
        ([SCRIPT, (f"{LIBRARY}/torch/optim/adamw.py", "_init_group", "zeros")], Activity.OPTIMIZER),
        ([SCRIPT, ("/w/train.py", "main", 'torch.load("a.pt")')], Activity.LOADING),
        ([SCRIPT, ("/w/train.py", "main", "model.to(device)")], Activity.LOADING),
        ([SCRIPT, ("/w/train.py", "main", "x = batch.to(device)")], Activity.UNKNOWN),
        ([SCRIPT, ("/w/train.py", "validate", "out = model(x)")], Activity.EVALUATION),
        ([SCRIPT, ("/w/train.py", "_predict_batch", "out = model(x)")], Activity.EVALUATION),
        ([SCRIPT, ("/w/train.py", "sample_loss", "out = model(x)")], Activity.UNKNOWN),
        (
            [SCRIPT, (f"{LIBRARY}/torchtune/kv_cache.py", "__init__", "self.k_cache = zeros(shape)")],
            Activity.GENERATION,
        ),
        # The innermost line decides: the first evaluation of a training run.
        ([("/w/train.py", "test", "loss.backward()"), ("/w/train.py", "f", "g()")], Activity.BACKWARD),
    ],
)
def test_activity(frames: list[Frame], activity: Activity):
    assert find_activity(parsed(*frames)) is activity


@pytest.mark.parametrize(
    ("function", "code", "without", "within"),
    [
        ("main", "self.optimizer.step()", {CHECKPOINTING}, {"cpu-offload-optimizer", "8-bit-optimizer"}),
        ("main", "model.cuda()", {CHECKPOINTING, "micro-batch", "lora"}, {"bfloat16", "4-bit-weights"}),
        ("evaluate", "model(x)", {CHECKPOINTING, "micro-batch", "8-bit-optimizer"}, {"bfloat16"}),
        ("main", "loss.backward()", set(), {"bfloat16", "micro-batch", CHECKPOINTING}),
    ],
)  # fmt: skip
def test_fixes_are_those_of_the_activity(function: str, code: str, without: set[str], within: set[str]):
    fixes = {step.fix for step in failed(("/w/a.py", function, code)).steps}
    assert within <= fixes and not without & fixes


@pytest.mark.parametrize(
    ("code", "command"),
    [
        ("jac = vmap(jacrev(f), (None, 0))(p, x)", "torch.func.jacrev(function, chunk_size=64)"),
        ("grads = vmap(grad(loss))(p, x)", "torch.func.vmap(function, chunk_size=64)"),
        ('state = torch.load("last.pt")', 'torch.load(path, map_location="cpu")'),
        ("d = torch.cdist(a, b)", "for part in rows.split(1024): ..."),
        ("self.k_cache = torch.zeros(shape)", ""),
        ("y = model(x)", None),
    ],
)
def test_advice_for_the_call(code: str, command: str | None):
    first = failed(("/w/net.py", "forward", code)).steps[0]
    assert (first.command == command) if command is not None else "memprof" in first.command


INFERENCE = "with torch.inference_mode():"


@pytest.mark.parametrize(
    ("function", "code", "is_asked"),
    [
        ("evaluate", "y = model(x)", True),
        ("Trainer.evaluate", "y = model(x)", True),
        ("evaluate", "with torch.no_grad(): y = model(x)", False),
        ("evaluate", "with torch.inference_mode(): y = model(x)", False),
        ("main", "y = model(x)", False),
    ],
)
def test_an_evaluation_is_asked_for_its_gradients(function: str, code: str, is_asked: bool):
    frames = parsed(("/w/net.py", function, code))
    commands = [(step.command, step.code) for step in list_call_advice(frames, find_activity(frames))]
    assert commands == ([(INFERENCE, "python")] if is_asked else [])


@pytest.mark.parametrize(("num_inner", "is_given"), [(7, True), (8, False)])
def test_the_calls_of_the_innermost_eight_lines_count(num_inner: int, is_given: bool):
    frames = parsed(("/w/a.py", "f", "torch.cdist(a, b)"), *[("/w/b.py", "g", "h()")] * num_inner)
    assert bool(list(list_call_advice(frames, Activity.UNKNOWN))) == is_given


# -- the script --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frames", "script"),
    [
        ([SCRIPT], "/w/train.py"),
        ([("train.py", "<module>", "main()"), ("/w/net.py", "forward", "x")], "train.py"),
        ([("<frozen runpy>", "_run_module_as_main", ""), ("/w/pkg/train.py", "<module>", "main()")], "/w/pkg/train.py"),
        ([("/w/net.py", "forward", "x")], None),  # not the outermost frame of a script
        ([("/usr/local/bin/llamafactory-cli", "<module>", "sys.exit(main())")], None),
        ([(f"{LIBRARY}/torch/distributed/run.py", "<module>", "main()")], None),
        ([("/tmp/ipykernel_81/123.py", "<module>", "f()")], None),
        ([("<stdin>", "<module>", "")], None),
        ([], None),
    ],
)
def test_the_user_s_script(frames: list[Frame], script: str | None):
    assert find_script(parsed(*frames)) == script


@pytest.mark.parametrize(
    ("path", "before", "command"),
    [
        ("train.py", "", "memprof run --gpu-vram 15.77 train.py"),
        ("/w/my runs/train.py", "", "memprof run --gpu-vram 15.77 '/w/my runs/train.py'"),
        (r"C:\ai\train.py", "", r"memprof run --gpu-vram 15.77 C:\ai\train.py"),
        (r"C:\my ai\train.py", "", r'memprof run --gpu-vram 15.77 "C:\my ai\train.py"'),
        ("/w/train.py", "$ python train.py --lr 1e-3 > log\n", "memprof run --gpu-vram 15.77 /w/train.py --lr 1e-3"),
    ],
)
def test_the_script_is_offered_to_run(path: str, before: str, command: str):
    assert command in [step.command for step in failed((path, "<module>", "main()"), before=before).steps]


def test_without_a_model_a_fix_is_switched_on_in_the_script_or_has_no_command():
    by_fix = {step.fix: step.command for step in failed(SCRIPT).steps if step.fix}
    assert by_fix["bfloat16"] == ""
    found = failed(SCRIPT, before="--model_name_or_path Qwen/Qwen3-4B\n")
    assert any("memprof run" in step.command for step in found.steps)
    assert any("memprof profile --model qwen3-4b" in step.command for step in found.steps)


@pytest.mark.parametrize(
    ("log", "arguments"),
    [
        ("python train.py", ""),
        ("python3.11 -u /w/train.py --lr 1e-3 config.yaml", "--lr 1e-3 config.yaml"),
        ("torchrun --nproc-per-node 8 train.py --bf16", "--bf16"),
        ("python train.py --bf16 2>&1 | tee log", "--bf16"),
        ("python train.py --bf16 > log", "--bf16"),
        ("python train.py --run $(touch x)", ""),
        ("python train.py --run `touch x`", ""),
        ("python train.py; rm -r x", ""),
        ("python other.py --bf16", ""),
        ("editing train.py --bf16", ""),
    ],
)
def test_arguments_of_the_script(log: str, arguments: str):
    assert find_arguments("/w/train.py", log) == arguments


# -- a guessed model ---------------------------------------------------------------------------------------------------

LOGITS = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 7.45 GiB. GPU 0 has a total capacity of 23.52 GiB "
    "of which 5.04 GiB is free. Of the allocated memory 18.02 GiB is allocated by PyTorch, and 42.30 MiB is reserved "
    "by PyTorch but unallocated.\n"
)


def test_a_guess_of_the_model_is_called_one():
    found = failed(SCRIPT, ("/w/train.py", "main", "loss.backward()"), error=LOGITS)
    assert found.title.endswith(", perhaps logits")
    assert found.tensors[0].is_guess and "a guess" in found.tensors[0].why
    chunked = next(step for step in found.steps if step.fix == "chunked-loss")
    assert chunked.what.startswith("if it is logits: ")
    assert "memprof run" in found.steps[0].command


def test_a_traceback_that_mentions_logits_makes_the_role_certain_and_not_the_model():
    found = failed(SCRIPT, ("/w/net.py", "forward", "logits = self.lm_head(x)"), error=LOGITS)
    assert found.title.endswith(", logits")
    assert found.tensors[0].is_guess and found.tensors[0].in_traceback
    assert found.steps[0].fix == "chunked-loss" and "if it is" not in found.steps[0].what


def test_the_size_of_a_kv_cache_is_no_vocabulary():
    """1,024 MiB are 16,384 bfloat16 rows of a vocabulary of 32,768, and whatever else is round."""
    error = OOM.replace("128.00 MiB", "1024.00 MiB")
    frames = (f"{LIBRARY}/torchtune/modules/kv_cache.py", "__init__", "self.k_cache = torch.zeros(shape)")
    found = failed(("/w/generate.py", "<module>", "logits = generate(model)"), frames, error=error)
    assert not [one for one in found.tensors if one.role.startswith("logits")]
    assert not any(step.fix == "chunked-loss" for step in found.steps)
    known = failed(SCRIPT, before="--model mistralai/Mistral-7B-v0.3\n", error=error)
    assert any(one.role.startswith("logits") for one in known.tensors)
