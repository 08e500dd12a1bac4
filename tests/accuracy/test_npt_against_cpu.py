"""NPT components allocate and free on the virtual GPU what they do in a real training step on the CPU."""

from __future__ import annotations

import pytest
from torch import nn

from memprof.spec import NPT_MODES, TargetSpec
from memprof.workload.npt_layers import add_npt
from tests.accuracy.cpu_models import GPT2, LLAMA, Builder, tokens
from tests.accuracy.cpu_temporaries import compared
from tests.accuracy.test_against_cpu import check, plain, program

CASES = [
    *((LLAMA, {"npt": mode, "npt_rank": 4, "npt_chunk": 8}) for mode in NPT_MODES),
    # Not batched: the backward of its einsum multiplies matrices with no unit stride, which CUDA copies all at once
    # (aten/src/ATen/native/cuda/Blas.cpp, prepare_batch_matrix_for_cublas) and the CPU one by one.
    *(
        (LLAMA, {"npt": mode, "npt_rank": 4, "npt_num_ranks": 3, "npt_combine": combine, "npt_chunk": 32})
        for mode, combine in (("chunked", "sequential"), ("low-rank", "sequential"), ("low-rank", "merged"))
    ),
    (GPT2, {"npt": "low-rank", "npt_rank": 4}),
]


@pytest.mark.parametrize(
    ("build", "changes"), CASES, ids=lambda case: "-".join(map(str, case.values())) if isinstance(case, dict) else "m"
)
def test_allocations_equal_the_cpus(build: Builder, changes: dict[str, object]) -> None:
    def with_components() -> nn.Module:
        model = build()
        add_npt(model, TargetSpec(model="m", **changes))
        return model

    check(compared(program(with_components, lambda: tokens(32), plain)))
