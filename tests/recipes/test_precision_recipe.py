"""The recipe of case study 3: the guide's advice and tables as they come out of runs."""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.nightly  # in every run: test_parts.py


@pytest.fixture(scope="module")
def output(run):
    return run("3")


def rows(output, title):
    _, _, rest = output.partition(title)
    return rest.partition("\n\n")[2].partition("\n\n")[0].splitlines()


def test_the_page_shows_it(output, check_page):
    check_page(3, output, r"%.*% .* of |: activations deviate|bfloat16 deviates less")


def test_advice(output):
    lines = {re.split(r"  +", line)[0]: line for line in rows(output, "RTX 3060 Ti: the guide's advice")[0:]}
    lines = {name: line for name, line in lines.items() if name}
    died = {name for name, line in lines.items() if "out of memory in logits" in line}
    fits = {name for name, line in lines.items() if line.endswith("fits")}
    assert died | fits == set(lines)
    assert {"baseline", "2. half as many samples", "4. empty_cache() before each batch"} <= died
    assert {"1. float16", "bfloat16", "logits of the last token alone", "float16, batch 8, last logits"} <= fits
    same = [re.findall(r"[\d.]+ GiB", lines[name]) for name in ("baseline", "2. half as many samples")]
    assert same[0] == same[1]


def test_sizes(output):
    sizes = {line.split()[0]: line for line in rows(output, "The guide's sizes")[1:]}
    parameters = 1_235_814_400
    assert f"{4 * parameters / 2**30:.2f} GiB" in sizes["float32"]
    assert f"{2 * parameters / 2**30:.2f} GiB" in sizes["float16"]
    # Embedding in 16 bits; layers in 8 and their norms in 16, with a scale of 16 bits for each row.
    embedding, norms, layers = 128_256 * 2048, 33 * 2048, parameters - 128_256 * 2048 - 33 * 2048
    scales = 16 * (2048 + 512 + 512 + 2048 + 8192 + 8192 + 2048)
    assert f"{(2 * (embedding + norms + scales) + layers) / 2**30:.2f} GiB" in sizes["int8"]
    assert "DOES NOT HOLD 1.4" in output.claim("int8: 1.2 GB")
    assert "HOLDS" in output.claim("1.2B parameters")
    assert "FOR ONE SAMPLE AT BEST" in output.claim("GPUs of 8, 4, 4 and 2 GB")


def test_gpus(output):
    gpus = rows(output, "The guide's GPUs")
    assert len(gpus) == 8
    assert all("  fits  " in line for line in gpus)
    # 16 bytes for each of 1.24B parameters are 18.4 GiB.
    trains = [line for line in gpus if line.endswith("  trains")]
    assert trains
    assert all(float(re.findall(r"([\d.]+) GiB", line)[0]) > 18.4 for line in trains)


def test_precision_is_the_other_way_round(output):
    table = {line.split()[0]: line for line in rows(output, "Precision against accuracy")[1:]}
    least = {name: float(re.search(r"([\d.]+)% to", line)[1]) for name, line in table.items()}
    # No result in float16 can be nearer than its rounding on average, 2^-11 / sqrt(12) or so.
    assert 0.01 < least["float16"] < 0.1 < least["bfloat16"] < 1
    for dtype in ("float16", "bfloat16"):
        assert "DOES NOT HOLD" in output.claim(f"{dtype}: activations deviate")
    assert "DOES NOT HOLD 8 times as much" in output.claim("bfloat16 deviates less than float16")


def test_other_advice(output):
    samples = output.claim("fewer samples")
    assert "NO EFFECT" in samples
    # Three layers of 512 x 2048 in float16.
    assert 3 * 512 * 2048 * 2 == 6 * 2**20
    assert "6.00 MiB each, 58.59 GiB for 10,000" in samples
    assert "NO EFFECT" in output.claim("empty_cache()")
    assert "HOLDS" in output.claim("expandable_segments")
    assert "IT IS GIB" in output.claim("memory_allocated()")
