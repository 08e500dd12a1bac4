from memprof.verify.bench import verify
from memprof.verify.specimens import SPECIMENS


def test_the_numbers_are_the_same_on_any_number_of_cores(monkeypatch):
    answers = []
    for processes in "12":
        monkeypatch.setenv("MEMPROF_PROCESSES", processes)
        answers.append(verify(["fused-optimizer"], ["gpt2", "handwritten"], seeds=1).to_json())
    assert answers[0] == answers[1]
    assert {row["model"] for row in answers[0]["deviations"]} == {"gpt2", "handwritten"}


def test_models_have_no_cache_to_compile_for():
    for specimen in SPECIMENS.values():
        for build in (specimen.build, specimen.build_large):
            assert not getattr(getattr(build(), "config", None), "use_cache", False)
