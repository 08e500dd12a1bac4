import pytest

from memprof.flows.profile import profile
from memprof.flows.recommend.between import likely_needs
from memprof.spec import TargetSpec


@pytest.mark.parametrize("fixes", [(), ("chunked-loss",)])
def test_two_runs_tell_nearly_what_a_third_needs(fixes):
    def run(length):
        trace, document = profile(
            TargetSpec(model="pythia-70m", context_length=length, fixes=fixes, workspaces=False), explained=False
        )
        return trace, document.verdict

    made = {length: run(length) for length in (512, 1024, 1536)}
    verdict = made.pop(1536)[1]
    needs = likely_needs({length: trace for length, (trace, _) in made.items()}, 1536)
    context_bytes = made[512][0].facts.device.context_bytes
    assert needs.fits
    assert needs.required_reserved_bytes + context_bytes == pytest.approx(verdict.required_bytes, rel=0.05)
    assert likely_needs({512: made[512][0]}, 1536) is None


def test_guesses_see_what_the_card_refuses_and_what_giving_the_cache_back_saves():
    def run(length, vram):
        return profile(TargetSpec(model="pythia-70m", context_length=length, gpu_vram_bytes=vram), explained=False)

    made = {length: run(length, 2 << 30)[0] for length in (256, 512)}
    for length in (1024, 1536, 2048):
        assert likely_needs(made, length).fits == bool(run(length, 2 << 30)[1].verdict.fits)
