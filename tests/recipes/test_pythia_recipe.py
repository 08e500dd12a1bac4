"""The recipe of case study 2 runs from a checkout, what it says of the report is true, and its kernels are right."""

from __future__ import annotations

import collections
import functools
import importlib.util
import json
import re
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memprof.flows import profile as flow
from memprof.flows.vocabulary.frequencies import Frequencies
from tests.lanes import by_day, examples
from tests.processes import ROOT, python

RECIPE = ROOT / "recipes" / "2-pythia-vocabulary"
LIMIT_SECONDS = 120

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (Linux alone has it)"
)


@functools.cache
def load(name: str) -> ModuleType:
    """A module of the recipe, under a name of its own: other recipes have an audit and specs too."""
    spec = importlib.util.spec_from_file_location(f"pythia_recipe_{name}", RECIPE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- what it prints ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lines() -> list[str]:
    done = python(RECIPE / "run.py", folder=ROOT, seconds=8 * LIMIT_SECONDS)
    assert done.exit_code == 0, done.stderr
    assert not done.stderr
    # Two minutes on two idle cores; the wall clock of a machine that does other things too would say nothing.
    assert done.processor_seconds < 2 * LIMIT_SECONDS
    printed = done.stdout.splitlines()
    assert max(map(len, printed)) <= 100
    return printed


@pytest.fixture(scope="module")
def output(lines) -> str:
    return re.sub(r"\n  (?=\S)", " ", "\n".join(lines))


def claim(text: str, output: str) -> str:
    (line,) = [line for line in output.splitlines() if line.startswith(f"* {text}")]
    return line


def row(name: str, output: str) -> list[str]:
    return re.search(rf"^{name}  +(\S.*?)  +(\S.*)$", output, re.MULTILINE).groups()


LAYER = 12 * 512**2 + 13 * 512  # Weights of attention (4 h^2) and MLP (8 h^2), their biases (9 h) and two norms (4 h).


def parameters(words: int) -> int:
    return 6 * LAYER + 2 * 512 + 2 * 512 * words


@pytest.mark.nightly  # half a minute; in every run: test_parts.py
class TestOutput:
    @needs_triton
    def test_the_page_shows_it(self, output, check_page):
        check_page(2, re.sub(r"difference .*\n", "", output))  # measured, and left out by --no-measure

    def test_the_model_before_and_after(self, output):
        assert parameters(50_304) == 70_426_624  # as EleutherAI publishes it
        assert row("numbers", output) == (f"{parameters(50_000):,}", f"{parameters(10_000):,}")
        for name, copies in (("parameters", 1), ("gradients", 1), ("optimizer state", 2)):
            for words, figure in zip((50_000, 10_000), row(name, output), strict=True):
                # Blocks of 512 bytes; a step counter for each of 76 parameters; causal masks are no parameters.
                assert abs(float(figure.split()[0]) - copies * 4 * parameters(words) / 2**20) < 0.1
        before, after = (row("logits and loss", output)[i] for i in (0, 1))
        assert before == f"{4 * 4 * 4096 * 50_000 / 2**30:.2f} GiB"
        assert after == f"{4 * 4 * 4096 * 10_000 / 2**20:.2f} MiB"
        assert row("activations", output)[0] == row("activations", output)[1]

    def test_the_fault_is_found(self, output):
        assert re.search(r"Finding: Vocabulary of 33,278 where 10,000 were requested: 1\.\d\d GiB", output)
        assert "vocabulary-cap" in output
        fault, capped = re.search(r"^Peak ([\d.]+) GiB; capped ([\d.]+) GiB", output, re.MULTILINE).groups()
        assert f"{capped} GiB" == row("peak of the run", output)[1]
        assert float(fault) > 1.9 * float(capped)

    def test_batches(self, output):
        built = 1024 * 8 * (32 * 128 + 1)
        assert f"built          {built / 2**20:.2f} MiB" in output
        # The batch at hand, and the next one as it is made.
        assert f"streamed       {2 * 8 * (32 * 128 + 1) / 2**10:.2f} KiB" in output
        measured = int(re.search(r"^difference +(\d+) MiB resident", output, re.MULTILINE)[1])
        assert abs(measured - built / 2**20) <= 8

    def test_claims_on_the_model(self, output):
        assert "HOLDS 25,600,000 and 25,600,000" in claim("50K words: embedding", output)
        assert "DOES NOT HOLD 70.1M" in claim("50K words: ~200M", output)
        assert LAYER == 3_152_384
        assert "DOES NOT HOLD 6 x 3,152,384 = 18.9M" in claim("layers: 6 x 11M", output)
        assert "DOES NOT HOLD 29,155,328, 111.22 MiB" in claim("10K words: ~76M", output)
        assert "NOT IN PYTHIA" in claim("position embeddings", output)

    def test_claims_on_memory(self, output, monkeypatch):
        assert "DOES NOT HOLD 267.47 MiB and 802.4" in claim("before: 5-6 GB", output)
        oom = claim("before: out of memory with batch 8", output)
        assert "DOES NOT HOLD" in oom
        largest = int(re.search(r"the most that fit are ([\d,]+)", oom)[1].replace(",", ""))
        monkeypatch.syspath_prepend(str(RECIPE))
        fits = [
            flow.profile(load("specs").BEFORE.edit(batch_size=batch_size))[1].verdict.fits
            for batch_size in (largest, largest + 1)
        ]
        assert fits == [True, False]
        # Four logits of 128 x 50000 for each sequence are more than half of what is on the GPU then.
        assert 0.5 * 80 * 2**30 < largest * 4 * 4 * 128 * 50_000 < 79 * 2**30
        assert "HOLDS, AND BEFORE TOO" in claim("after: works with batch 32", output)
        assert "DOES NOT HOLD" in claim("after: activations ~2 GB", output)
        assert "DOES NOT HOLD" in claim("after: ~3.2 GB in one place", output)
        assert f"take {6 * 32 * 8 * 128 * 128 * 4 / 2**20:.2f} MiB" in claim("sparse attention", output)
        batches = 2_088_628 // 4096
        assert f"{batches * 8 * 4097 / 2**20:.2f} MiB of host" in claim("the whole dataset in batches", output)

    @needs_triton
    def test_kernels(self, output):
        assert "naive: 491,520 loads counted" in output and "tiled: 30,720 loads counted" in output
        assert 2 * 48 * 80 * 64 == 491_520 == 16 * 30_720
        assert output.count("within the bound of rounding") >= 2 and "OUTSIDE" not in output
        assert "CANNOT BE CHECKED" in claim("16 x 16 tiles in shared memory", output)
        assert "loads 16 times less" in claim("16 x 16 tiles in shared memory", output)
        assert "DOES NOT HOLD" in claim("... is a mend for memory", output)


def test_without_triton_it_says_so_and_goes_on(tmp_path):
    """`triton` cannot be found: one line instead of the kernels, and everything else as before."""
    program = (
        "import importlib.util, runpy, sys; find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'triton' else find(name, *a)\n"
        f"sys.path.insert(0, {str(RECIPE)!r}); import run; print(run.show_kernels())"
    )
    done = python("-c", program)
    assert done.exit_code == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("Not run: Triton is not installed") and second == "None"


# -- vocabulary and batches ----------------------------------------------------------------------------------------


class TestVocabulary:
    @pytest.mark.nightly  # in every run: test_parts.py shows words of this corpus
    def test_the_synthetic_corpus_has_the_size_of_wikitext_2(self):
        vocabulary = load("vocabulary")
        counts = collections.Counter(vocabulary.synthetic_corpus())
        assert (counts.total(), len(counts)) == (2_088_628, 33_278)
        ids = vocabulary.most_frequent(counts, 10_000)
        assert len(ids) == 10_000 and ids["<unk>"] == 0 and sorted(ids.values()) == list(range(10_000))
        # What the recipe says of the share is of the very words that it keeps.
        kept = sum(counts[word] for word in ids if word != "<unk>")
        assert Frequencies.of(counts.values()).count_covered_tokens(len(ids) - 1) == kept

    @given(st.lists(st.sampled_from(["a", "b", "c", "d", "<unk>"]), min_size=1), st.integers(1, 7))
    def test_a_cap_keeps_the_most_frequent(self, words, size):
        vocabulary = load("vocabulary")
        counts = collections.Counter(words)
        ids = vocabulary.most_frequent(counts, size)
        known = set(counts) - {"<unk>"}
        assert len(ids) == min(size, len(known) + 1) and sorted(ids.values()) == list(range(len(ids)))
        dropped = known - set(ids)
        assert all(counts[word] <= counts[kept] for word in dropped for kept in set(ids) - {"<unk>"})

    def test_every_word(self):
        assert load("vocabulary").every_word(["a", "b", "a", "c"]) == {"a": 0, "b": 1, "c": 2}


class TestBatches:
    @given(st.integers(0, 100), st.integers(1, 4), st.integers(1, 7))
    def test_streamed_and_built_are_the_same(self, tokens, batch_size, length):
        batches = load("batches")
        built = batches.built(range(tokens), batch_size, length)
        streamed = list(batches.streamed(iter(range(tokens)), batch_size, length))
        assert len(built) == len(streamed) == max(0, tokens - 1) // (batch_size * length)
        expected = 0
        for (inputs, targets), (others, _) in zip(built, streamed, strict=True):
            assert torch.equal(inputs, others) and inputs.shape == (batch_size, length)
            assert torch.equal(targets, inputs + 1)
            assert inputs.flatten().tolist() == list(range(expected, expected + batch_size * length))
            expected += batch_size * length

    @pytest.mark.parametrize("kind", by_day(["built", "streamed"]))
    def test_simulated_host_memory_is_what_a_process_takes(self, kind):
        batches = load("batches")
        few, many = 1 << 12, 1 << 22
        simulated = batches.simulated_bytes(kind, many) - batches.simulated_bytes(kind, few)
        # Both processes have torch in them; what differs is the batches, and Python's objects about each.
        measured = batches.measured_bytes(kind, many) - batches.measured_bytes(kind, few)
        assert simulated == (1023 * 8 * 4097 if kind == "built" else 8 * 4097)
        assert 0.9 * simulated < measured + 2**20 and measured < 1.15 * simulated + 4 * 2**20


def test_the_cap_on_a_built_model_is_the_cap_in_the_specification(monkeypatch):
    """memprof.apply(model, ["vocabulary-cap"]) leaves the same parameters as a model built with 10,000 words."""
    import memprof

    monkeypatch.syspath_prepend(str(RECIPE))
    try:
        model = load("model").pythia(50_000)
    finally:
        sys.modules.pop("vocabulary", None)
    memprof.apply(model, ["vocabulary-cap"], vocab_size=10_000)
    assert sum(p.numel() for p in model.parameters()) == parameters(10_000)


# -- kernels -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """The kernels in Triton's interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        module = load("matmul")
        assert module.interpreted()
        yield module


dtypes = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
sides = st.integers(1, 40)


@needs_triton
class TestKernels:
    @settings(deadline=None, max_examples=examples(60))
    @given(sides, sides, sides, dtypes, st.sampled_from(["naive", "tiled"]))
    @example(32, 17, 1, torch.float16, "naive")  # a product below the smallest normal number
    def test_against_float64(self, interpreted, m, n, k, dtype, kernel):
        assert interpreted.largest_error(m, n, k, dtype, kernel) <= interpreted.error_bound(k, dtype)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("size", [(16, 16, 16), (17, 1, 33), (1, 1, 1), (15, 31, 47), (64, 48, 80)])
    def test_against_torch(self, interpreted, size, dtype):
        m, n, k = size
        torch.manual_seed(0)
        a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
        magnitude = a.double().abs() @ b.double().abs()
        for kernel in ("naive", "tiled"):
            found = interpreted.matmul(a, b, kernel)
            assert found.dtype is dtype and found.shape == (m, n)
            # Each of the two is off by rounding at the most.
            error = (found.double() - torch.matmul(a, b).double()).abs()
            assert (error <= 2 * interpreted.error_bound(k, dtype) * magnitude).all()

    @pytest.mark.parametrize("kernel", ["naive", "tiled"])
    def test_any_strides(self, interpreted, kernel):
        torch.manual_seed(0)
        a, b = torch.randn(19, 40).T[::2], torch.randn(23, 38)[:, ::2].T
        assert not a.is_contiguous() and not b.is_contiguous()
        torch.testing.assert_close(interpreted.matmul(a, b, kernel), a @ b)

    @settings(deadline=None, max_examples=examples(25))
    @given(st.integers(1, 36), st.integers(1, 36), st.integers(1, 36))
    def test_loads(self, interpreted, m, n, k):
        """Counted one by one; 16 times fewer where 16 divides the sizes of the result."""
        for kernel in ("naive", "tiled"):
            with interpreted.counted_loads() as loads:
                interpreted.matmul(torch.ones(m, k), torch.ones(k, n), kernel)
            assert loads.count == interpreted.expected_loads(m, n, k, kernel)
        if m % 16 == n % 16 == 0:
            assert interpreted.expected_loads(m, n, k, "naive") == 16 * interpreted.expected_loads(m, n, k, "tiled")

    def test_counting_ends(self, interpreted):
        with pytest.raises(ValueError, match="no matrix product"), interpreted.counted_loads() as loads:
            interpreted.matmul(torch.ones(2, 3), torch.ones(4, 5))
        interpreted.matmul(torch.ones(2, 3), torch.ones(3, 5))
        assert loads.count == 0

    def test_empty_sizes(self, interpreted):
        assert interpreted.matmul(torch.ones(0, 3), torch.ones(3, 5)).shape == (0, 5)
        assert torch.equal(interpreted.matmul(torch.ones(4, 0), torch.ones(0, 5)), torch.zeros(4, 5))

    @pytest.mark.parametrize(
        ("a", "b"),
        [
            (torch.ones(2, 3), torch.ones(4, 5)),
            (torch.ones(3), torch.ones(3, 5)),
            (torch.ones(2, 3), torch.ones(3, 5, dtype=torch.float16)),
            (torch.ones(2, 3, dtype=torch.int64), torch.ones(3, 5, dtype=torch.int64)),
        ],
    )
    def test_what_does_not_go_together(self, interpreted, a, b):
        with pytest.raises(ValueError, match=r"no matrix product|must be one of"):
            interpreted.matmul(a, b)

    @pytest.mark.nightly
    def test_compiled_for_a_gpu(self, tmp_path):
        """Without a GPU: tiles lie in shared memory, and no load of the naive kernel was taken away."""
        program = (
            f"import json, sys; sys.path.insert(0, {str(RECIPE)!r}); import matmul\n"
            "kinds = [(k, d) for k in matmul.KERNELS for d in ('fp32', 'fp16', 'bf16')]\n"
            "print(json.dumps({f'{k} {d}': matmul.compiled(k, d) for k, d in kinds}))"
        )
        environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True, text=True, env=environment, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        made = json.loads(done.stdout)
        for dtype, num_bytes in (("fp32", 4), ("fp16", 2), ("bf16", 2)):
            assert made[f"naive {dtype}"][0] == 0
            # 256 results by 128 threads: each thread loads for two, one number of A and one of B.
            assert made[f"naive {dtype}"][1] == 4
            shared = made[f"tiled {dtype}"][0]
            assert shared and shared % (2 * 16 * 16 * num_bytes) == 0


@needs_triton
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_on_a_gpu(tmp_path):
    """The compiled kernels are right, and the tiled one is not slower than the naive one."""
    done = subprocess.run(
        [sys.executable, RECIPE / "matmul.py"], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "OUTSIDE" not in done.stdout and done.stdout.count("within the bound") == 2
    times = {name: float(ms) for name, ms in re.findall(r"^(\w+): ([\d.]+) ms", done.stdout, re.MULTILINE)}
    assert set(times) == {"naive", "tiled", "torch"}
    assert times["tiled"] <= times["naive"]
