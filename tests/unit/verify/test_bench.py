from memprof.verify.bench import verify


def test_the_numbers_are_the_same_on_any_number_of_cores(monkeypatch):
    answers = []
    for processes in "12":
        monkeypatch.setenv("MEMPROF_PROCESSES", processes)
        answers.append(verify(["fused-optimizer"], seeds=1).to_json())
    assert answers[0] == answers[1]
    assert {row["model"] for row in answers[0]["deviations"]} == {"gpt2", "llama", "gemma2", "handwritten"}
