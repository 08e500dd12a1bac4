"""The moments of inference with a small decoder: three prompts of ten tokens, in bytes that are counted by hand."""

from __future__ import annotations

from memprof.estimate.peaks import list_moments
from memprof.estimate.state import PeakMoment
from tests.unit.estimate.tiny import COUNT, plan, tiny_model

LOADED = {"parameters": 2 * COUNT}
WORKSPACE = {"library workspace": 8_519_680}


def test_weights_are_loaded() -> None:
    assert list_moments(tiny_model(), plan("weights"), 3, 10) == (PeakMoment("loaded", LOADED),)


def test_the_prompt_and_the_last_of_five_tokens() -> None:
    # In the MLP: the residual, its norm, gate, up and product. Beside: the embedding's output, the layer's input,
    # cosines and sines.
    prompt = 30 * (128 + 128 + 3 * 384) + 2 * 30 * 128 + 2 * 10 * 16 * 2
    # Keys or values of one layer are copied to be longer; logits, four hidden states, gate, up and product.
    token = 3 * 14 * 32 * 2 + 3 * (1000 + 4 * 64 + 3 * 192) * 2
    assert list_moments(tiny_model(), plan("inference", new_tokens=5), 3, 10) == (
        PeakMoment(
            "last layer of the prompt", LOADED | {"KV cache": 3 * 2 * 30 * 32 * 2, "activations": prompt} | WORKSPACE
        ),
        PeakMoment("last token", LOADED | {"KV cache": 3 * 2 * 42 * 32 * 2, "activations": token} | WORKSPACE),
    )
