from __future__ import annotations

import pytest
import torch
import transformers

from memprof.device.catalog import find_gpu
from memprof.trace.events import PhaseKind
from memprof.virtual import VirtualGpu


def test_beam_search_goes_on_to_the_longest_text():
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        pad_token_id=0, eos_token_id=None, bos_token_id=1,
    )  # fmt: skip
    original = vars(transformers.GenerationMixin)["_beam_search_has_unfinished_sequences"]
    with VirtualGpu(find_gpu("h100-80gb")) as gpu:
        model = transformers.LlamaForCausalLM(config).to("cuda").eval()
        prompt = torch.randint(1, 50, (2, 4), device="cuda")
        model.generate(prompt, max_new_tokens=7, num_beams=3, do_sample=False)
        keys = {storage.shape for storage in gpu.trace.storages if gpu.trace.op(storage) == "aten.cat"}
        # Six of the seven tokens are fed back: the cache ends with 4 + 6 positions, for 2 x 3 beams and 2 heads.
        assert (6, 2, 10, 8) in keys and (6, 2, 11, 8) not in keys
        assert any(phase.kind is PhaseKind.DECODE for phase in gpu.trace.phases)
        assert any("longest text" in said for said in gpu.trace.assumptions)
    assert vars(transformers.GenerationMixin)["_beam_search_has_unfinished_sequences"] is original


WAYS: tuple[dict[str, object], ...] = (
    {},
    {"do_sample": True, "top_k": 5, "top_p": 0.9},
    {"num_beams": 3},
    {"num_beams": 3, "do_sample": True},
    {"prompt_lookup_num_tokens": 2},
    {"assisted": True},
)
ENDS: tuple[int | list[int], ...] = (0, 1, 30, 49, [0, 2], [30, 31, 32, 33])


def _ways_to_end() -> list[object]:
    """Each way, and ends of one and several tokens of the plain one, in every run; all pairs at night."""
    by_day = [*((how, 49) for how in WAYS), ({}, 0), ({}, [30, 31, 32, 33])]
    marks = {True: (), False: (pytest.mark.nightly,)}
    pairs = [(how, end) for how in WAYS for end in ENDS]
    return [pytest.param(*pair, marks=marks[pair in by_day]) for pair in pairs]


@pytest.mark.parametrize(("how", "end"), _ways_to_end(), ids=str)
def test_generation_ends_by_length(how, end):
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        pad_token_id=0, eos_token_id=end, bos_token_id=1,
    )  # fmt: skip
    with VirtualGpu(find_gpu("h100-80gb")):
        model, helper = (transformers.LlamaForCausalLM(config).to("cuda").eval() for _ in range(2))
        options = {"assistant_model": helper} if how.get("assisted") else how
        for batch in (1,) if "assisted" in how or "prompt_lookup_num_tokens" in how else (1, 2, 4):
            prompt = torch.randint(5, 24, (batch, 4), device="cuda")
            made = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=7, **options)
            assert made.shape == (batch, 11)
