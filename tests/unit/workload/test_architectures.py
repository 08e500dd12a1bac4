"""Models that are no language model: each is fed what its forward takes, and is never told to have tokens if not."""

import json

import pytest

from memprof.errors import UsageError
from memprof.flows.profile import profile
from memprof.report.documents.report import Report
from memprof.spec import TargetSpec
from tests.lanes import by_day

_TEXT = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100,
    "max_position_embeddings": 64,
}  # fmt: skip
_IMAGE = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
_SOUND = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "conv_dim": [32] * 7,
    "vocab_size": 32, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
}  # fmt: skip
_STAGES = {
    "depths": [1, 1], "num_encoder_blocks": 2, "hidden_sizes": [8, 16], "num_attention_heads": [1, 2],
    "sr_ratios": [2, 1], "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16,
}  # fmt: skip
_T5 = {
    "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2, "vocab_size": 100,
    "is_encoder_decoder": True, "decoder_start_token_id": 0,
}  # fmt: skip
_WHISPER = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 100, "num_mel_bins": 8, "max_source_positions": 50,
    "max_target_positions": 20, "decoder_start_token_id": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CASES = {
    "BertModel": ("bert", _TEXT, 48),
    "BertForSequenceClassification": ("bert", _TEXT, 48),
    "BertForTokenClassification": ("bert", _TEXT, 48),
    "DebertaV2ForMaskedLM": ("deberta-v2", _TEXT, 48),
    "T5ForConditionalGeneration": ("t5", _T5, 48),
    "T5Model": ("t5", _T5, 48),
    "WhisperForConditionalGeneration": ("whisper", _WHISPER, 20),
    "MambaModel": ("mamba", {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 100, "state_size": 4}, 48),
    "CLIPModel": ("clip", {"text_config": _TEXT, "vision_config": _IMAGE, "projection_dim": 16}, 48),
    "ViTModel": ("vit", _IMAGE, None),
    "ViTForImageClassification": ("vit", _IMAGE, None),
    "ResNetModel": ("resnet", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}, None),
    "SegformerForSemanticSegmentation": ("segformer", _STAGES, None),
    "Wav2Vec2Model": ("wav2vec2", _SOUND, None),
    "Wav2Vec2ForCTC": ("wav2vec2", _SOUND, None),
}


def _run(folder, architecture, mode="train", **config) -> Report:
    values = {"architectures": [architecture], **config}
    length = {} if "context" not in values else {"context_length": values.pop("context")}
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return profile(TargetSpec(model=str(folder), batch_size=2, mode=mode, gpu_vram_bytes=8 << 30, **length))[1]


@pytest.mark.parametrize("architecture", by_day(CASES, *[*CASES][::3]))
def test_it_is_trained_and_said_rightly(architecture, tmp_path):
    model_type, config, tokens = CASES[architecture]
    asked = {} if tokens is None else {"context": 48}
    document = _run(tmp_path, architecture, model_type=model_type, **config, **asked)
    assert document.verdict.fits
    title = str(document).partition("\n\n")[0]
    assert ("tokens" in title) == (tokens is not None)
    if tokens is None:
        assert document.target.context_length is None and "batch 2" in title


def test_a_dtype_that_there_is_not(tmp_path):
    with pytest.raises(UsageError, match="float9"):
        _run(tmp_path, "BertModel", model_type="bert", torch_dtype="float9", **_TEXT)
