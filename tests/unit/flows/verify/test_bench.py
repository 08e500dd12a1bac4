import pytest

from memprof.flows.verify.bench import verify
from memprof.flows.verify.specimens import SPECIMENS


@pytest.mark.nightly
def test_the_numbers_are_the_same_on_any_number_of_cores(monkeypatch):
    for name in ("gemma2", "handwritten", "npt"):  # two are enough, of those that nobody named
        monkeypatch.delitem(SPECIMENS, name)
    answers = []
    for processes in "12":
        monkeypatch.setenv("MEMPROF_PROCESSES", processes)
        answers.append(verify(["freeze", "fused-optimizer"], seeds=1).to_json())
    assert answers[0] == answers[1]
    assert {row["model"] for row in answers[0]["deviations"]} == {"gpt2", "llama"}
    assert [row["fix"] for row in answers[0]["peaks"]] == ["freeze", "fused-optimizer"]


def test_models_have_no_cache_to_compile_for():
    for specimen in SPECIMENS.values():
        for build in (specimen.build, specimen.build_large):
            assert not getattr(getattr(build(), "config", None), "use_cache", False)
