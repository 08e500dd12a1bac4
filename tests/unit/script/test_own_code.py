"""Code that evaluates or trains, in the files of a program and in modules of its own."""

from __future__ import annotations

import linecache
import sys
import threading
from pathlib import Path
from types import FrameType, ModuleType

import pytest
import torch

from memprof.script.own_code import (
    find_evaluation_step,
    has_evaluation,
    has_later_evaluation,
    has_training,
    has_unfreezing,
    may_train,
)


def frame_of(file: Path, text: str) -> FrameType:
    """Return the frame of a program in `file`, as it is where it calls `stop()`."""
    file.write_text(text)
    frames: list[FrameType] = []
    names = {"stop": lambda: frames.append(sys._getframe(1))}
    thread = threading.Thread(target=exec, args=(compile(text, str(file), "exec"), names))  # no frame of this file
    thread.start()
    thread.join()
    return frames[0]


@pytest.mark.parametrize(
    ("line", "evaluates"),
    [
        ("model.eval()", True),
        ("if done: model.module.eval()", True),
        ("if phase == 'val': model.eval()", True),
        ("self.vgg = vgg19().features[:36].eval()", False),  # frozen from the beginning
        ("# model.eval()", False),
        ("trainer.evaluate()", True),
        ("validate(model, loader)", True),
        ("run_validation(model)", True),
        ("eval_epoch(model)", True),
        ("with torch.inference_mode():", True),
        ("Trainer(model, eval_dataset=data)", False),  # evaluates by a strategy alone
        ("eval_strategy='epoch'", True),
        ('eval_strategy = "no"', False),
        ('"eval_strategy": "no"', False),
        ('"eval_strategy": "steps"', True),
        ("trainer.fit(model, val_dataloaders=loader)", True),
        ("model.train()", False),
        ("ast.literal_eval(text)", False),
        ("medieval(1)", False),
        ("invalid = 3", False),
    ],
)
def test_calls_that_evaluate(tmp_path: Path, line: str, evaluates: bool) -> None:
    assert has_evaluation(frame_of(tmp_path / "train.py", f"stop()\n'''\n{line}\n'''\n")) == evaluates


def test_modules_of_the_program_are_looked_at_and_others_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own").mkdir()
    for folder, text in ((tmp_path, "model.eval()"), (tmp_path / "own" / "sub", "pass")):
        folder.mkdir(exist_ok=True)
        module = ModuleType("engine")
        module.__file__ = str(folder / "engine.py")
        (folder / "engine.py").write_text(text)
        monkeypatch.setitem(sys.modules, f"engine_of_{folder.name}", module)
    frame = frame_of(tmp_path / "own" / "train.py", "stop()")
    assert not has_evaluation(frame)
    (tmp_path / "own" / "sub" / "engine.py").write_text("model.eval()  # now")
    linecache.checkcache()
    assert has_evaluation(frame)


def test_without_a_frame_of_the_program_nothing_is_known() -> None:
    assert not has_evaluation(None)


def error_of(file: Path, text: str, names: dict[str, object] | None = None) -> ZeroDivisionError:
    """Return the error of a program in `file`, which has `names` beside its own."""
    file.write_text(text)
    linecache.checkcache()
    with pytest.raises(ZeroDivisionError) as caught:
        exec(compile(text, str(file), "exec"), {} if names is None else names)
    error = caught.value
    assert error.__traceback__ is not None
    return error.with_traceback(error.__traceback__.tb_next)  # without this file


@pytest.mark.parametrize(
    ("line", "trains"),
    [
        ("loss.backward()", True),
        ("torch.autograd.grad(y, x)", True),
        ("optimizer = AdamW(parameters)", True),
        ("optim = SGD(parameters)", True),
        ("trainer.fit(model)", True),
        ("transformers.Trainer(model)", True),
        ("train_one_epoch(model)", True),
        ("model.train()", True),
        ("loss_fn(model(x))", True),
        ("model.train(False)", False),
        ("model.train(mode)", True),
        ("F.dropout(x, training=self.training)", False),
        ("training(model)", True),
        ("model = AutoModel.from_pretrained(name).eval()", False),
        ("x.requires_grad", False),
        ("torch.no_grad()", False),
        ("outfit = constrain(x)", False),
        ("x = 1  # no backward", False),
        ("'a loss'", False),
    ],
)
def test_words_of_training(tmp_path: Path, line: str, trains: bool) -> None:
    assert may_train(error_of(tmp_path / "serve.py", f"if 0:\n    {line}\n1 / 0\n")) == trains
    assert has_training(frame_of(tmp_path / "serve.py", f"if 0:\n    {line}\nstop()\n")) == trains


def test_code_that_cannot_be_read_may_train(tmp_path: Path) -> None:
    error = error_of(tmp_path / "serve.py", "1 / 0\n")
    (tmp_path / "serve.py").write_text("x = (1")
    linecache.checkcache()
    assert may_train(error)


@pytest.mark.parametrize(
    ("text", "trains"),
    [
        ("def run(f):\n    loss = f()\n    return run.training, loss", False),
        ("def run(f):\n    f()\n    self.optimizer_step()", True),
        ("def fit_loop(f):\n    f()\nrun = fit_loop", True),
        ("def run(f):\n    f()\ndef train():\n    run(1).backward()", False),  # it is not running
    ],
)
def test_a_library_that_trains_is_running(tmp_path: Path, text: str, trains: bool) -> None:
    library = tmp_path / "site-packages" / "library.py"
    library.parent.mkdir()
    names: dict[str, object] = {}
    exec(compile(text, str(library), "exec"), names)
    assert may_train(error_of(tmp_path / "serve.py", "run(lambda: 1 / 0)\n", {"run": names["run"]})) == trains


def test_an_error_of_a_library_alone_is_of_a_program_that_may_train(tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    assert may_train(error_of(tmp_path / "site-packages" / "serve.py", "1 / 0\n"))


@pytest.mark.parametrize(
    ("line", "unfreezes"),
    [
        ("unfrozen(model.parameters()).requires_grad = True", True),
        ("[p.requires_grad_(True) for p in net.parameters()]", True),
        ("self.backbone.requires_grad_()", True),
        ("model.layers[i].requires_grad_(True)", True),
        ("trainer.unfreeze_encoder(2)", True),
        ("set_requires_grad(discriminator, True)", True),
        ("thaw(model)", True),  # a function of the program
        ("set_requires_grad(discriminator, False)", False),
        ("frozen(model.parameters()).requires_grad = False", False),
        ("model.requires_grad_(False)", False),
        ("images.requires_grad_(True)", False),
        ("freeze(model)", False),
    ],
)
@pytest.mark.parametrize("in_loop", [True, False])
def test_training_loops_that_unfreeze_parameters(tmp_path: Path, line: str, unfreezes: bool, in_loop: bool) -> None:
    """What stands before the loop was done."""
    lines = ["def thaw(x):", "    for p in x.parameters():", "        p.requires_grad = True"]
    lines += [] if in_loop else [f"def before(model): {line}"]
    lines += ["for epoch in range(1):", *([f"    if epoch: {line}"] if in_loop else [])]
    lines += ["    for step in range(1):", "        stop()"]
    file, answers = tmp_path / "train.py", list[bool]()
    file.write_text("\n".join(lines))
    linecache.checkcache()
    names = {"stop": lambda: answers.append(has_unfreezing(sys._getframe(1)))}
    thread = threading.Thread(target=exec, args=(compile(file.read_text(), str(file), "exec"), names))
    thread.start()
    thread.join()
    assert answers == [unfreezes and in_loop]


def test_a_training_function_that_has_unfrozen_parameters_before_its_loop_is_not_called_anew(tmp_path: Path) -> None:
    file, answers = tmp_path / "train.py", list[bool]()
    file.write_text(
        "def train(model):\n"
        "    for p in model.parameters():\n        p.requires_grad = True\n"
        "    for step in range(1):\n        model.train()\n        stop()\n"
        "train(model)\n"
    )
    names = {"stop": lambda: answers.append(has_unfreezing(sys._getframe(1))), "model": torch.nn.Linear(1, 1)}
    exec(compile(file.read_text(), str(file), "exec"), names)
    assert answers == [False]


@pytest.mark.parametrize(
    ("text", "is_later"),
    [
        ("for x in [1]:\n    stop()\nevaluate(model.to(device))\n", True),
        ("for x in [1]:\n    stop()\nprint(test, evaluate(model.cuda(), data))\n", True),
        (
            "for x in [1]:\n    stop()\nmodel.to(device)\nevaluate(model)\n",
            False,
        ),  # as in the loop, for all that is known
        ("for x in [1]:\n    stop()\nevaluate(model)\n", False),
        ("for x in [1]:\n    stop()\n    evaluate(model.to(device)) if 0 else 0\n", False),
        ("stop()\nevaluate(model.to(device))\n", False),
        (
            "def f():\n    for x in [1]:\n        stop()\n    if data:\n        evaluate(model.to(device))\nf()\n",
            True,
        ),
        ("def main():\n    for x in [1]:\n        stop()\nmain()\ndef f():\n    evaluate(model.to(device))\n", False),
    ],
)
def test_an_evaluation_after_the_loop_that_moves_something(tmp_path: Path, text: str, is_later: bool) -> None:
    answers: list[bool] = []
    names = dict.fromkeys(("evaluate", "model", "device", "data", "test"), print)
    names |= {"stop": lambda: answers.append(has_later_evaluation(sys._getframe(1)))}
    file = tmp_path / "train.py"
    file.write_text(text)
    linecache.checkcache()
    code = compile(text.replace("model.to(device)", "0").replace("model.cuda()", "0"), str(file), "exec")
    thread = threading.Thread(target=exec, args=(code, names))
    thread.start()
    thread.join()
    assert answers == [is_later]


@pytest.mark.parametrize(
    ("loop", "step"),
    [
        ("for i in range(50):\n  stop()\n  if i % every == 0 and i:\n    validate(model)", 1000),
        ("for i in range(50):\n  stop()\n  if i % 2 == 0:\n    validate(model)", None),  # it has come to that
        ("for i in range(50):\n  stop()\n  if i % every == 1:\n    log(i)\n  if i < 0:\n    validate(model)", None),
        ("for epoch in range(2):\n  for i in range(50):\n    stop()\n  validate(model)", 50),
        ("for i in range(50):\n  stop()\nvalidate(model)", None),
    ],
)
def test_the_step_after_which_an_evaluation_comes(tmp_path: Path, loop: str, step: int | None) -> None:
    (tmp_path / "train.py").write_text(loop)
    found: list[int | None] = []
    names: dict[str, object] = dict.fromkeys(("model", "validate", "log"), print)
    names |= {"every": 1000, "stop": lambda: found.append(find_evaluation_step(sys._getframe(1), 2))}
    thread = threading.Thread(target=exec, args=(compile(loop, str(tmp_path / "train.py"), "exec"), names))
    thread.start()
    thread.join()
    assert found[0] == step
