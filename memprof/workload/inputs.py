"""Input batches for each kind of model, with the shapes of a real run and labels at every position."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memprof.errors import UsageError
from memprof.workload.lengths import Lengths
from memprof.workload.loss import INPUTS_HINT
from memprof.workload.models import ModelSource

Batch = dict[str, Any]


class Feeder:
    """Source of a run's input batches, in host memory: tokens, images or audio by the task of `source`.
    Raises UsageError if the model's inputs are not known."""

    def __init__(
        self,
        source: ModelSource,
        model: nn.Module,
        batch_size: int,
        context_length: int | None,
        lengths: Lengths | None = None,
    ) -> None:
        self.model = model
        self.batch_size = batch_size
        self.assumptions: list[str] = []  # may have duplicates
        self.takes_tokens = source.task != "image-classification"  # whether a batch has samples of `context_length`
        self.sequence_lengths: list[int] = []  # tokens per sequence in each batch so far, if lengths vary
        if lengths is not None:
            self.context_length = context_length or source.max_positions or 1 << 30
            self._batches = lengths.batches(batch_size, self.context_length)
            if source.task not in ("causal-lm", "masked-lm", "seq2seq-lm"):
                raise UsageError(
                    "--lengths is for models of Hugging Face that are fed tokens",
                    value=source.name,
                    hint="leave it out; a model of one's own says in memprof_inputs what it is fed",
                )
            self.host_batch: Callable[[], Batch] = self._make_padded_tokens
            return
        self.context_length = context_length or min(2048, source.max_positions or 2048)
        batch_makers: dict[str, Callable[[], Batch]] = {
            "causal-lm": self._make_tokens,
            "masked-lm": self._make_tokens,
            "seq2seq-lm": self._make_tokens,
            "image-classification": self._make_images,
            "speech-seq2seq": self._make_speech_batch,
            "other": self._make_batch_by_signature,
        }
        if source.task == "other":
            self.takes_tokens = "input_ids" in inspect.signature(model.forward).parameters
            text_config = getattr(model.config, "text_config", None)  # of a model with a text tower
            positions = getattr(text_config, "max_position_embeddings", None)
            self.context_length = min(self.context_length, positions or self.context_length)
        # Function that returns a batch in host memory, as a data loader does.
        self.host_batch = batch_makers.get(source.task) or self._find_custom_maker()
        if context_length is None and self.takes_tokens and source.task != "speech-seq2seq":
            note = f"Context length {self.context_length:,} (no --context-length was given)."
            self.assumptions.insert(0, note)
        self._dataset: Batch = {}

    def build_dataset(self, batches: int) -> None:
        """Allocate a dataset of `batches` batches in host memory, one tensor [batches, ...] for each input.
        Each step's batch is a separate tensor, as from a DataLoader."""
        example = self.host_batch()
        self._dataset = {
            name: torch.zeros(batches, *value.shape, dtype=value.dtype)
            for name, value in example.items()
            if isinstance(value, torch.Tensor)
        }
        self.assumptions.append(f"{batches:,} batches are held in host memory, made before training.")

    def _make_tokens(self) -> Batch:
        """Return input_ids and labels, int64 (batch, length), without padding or ignored labels."""
        ids = torch.zeros(self.batch_size, self.context_length, dtype=torch.int64)
        return {"input_ids": ids, "labels": ids.clone()}

    def _make_padded_tokens(self) -> Batch:
        """Return input_ids, attention_mask and labels, int64 (batch, longest), padded on the right; labels of padding
        are ignored (-100)."""
        lengths, longest = next(self._batches)
        self.sequence_lengths.append(longest)
        ids = torch.zeros(len(lengths), longest, dtype=torch.int64)
        mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    def _make_images(self) -> Batch:
        """Return pixel_values, float (batch, channels, height, width), and one label per image."""
        return {"pixel_values": self._make_pixels(), "labels": torch.zeros(self.batch_size, dtype=torch.int64)}

    def _make_pixels(self) -> torch.Tensor:
        config: Any = self.model.config
        config = getattr(config, "vision_config", config)
        size = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        channels = getattr(config, "num_channels", 3)
        return torch.zeros(self.batch_size, channels, height, width, dtype=_find_parameter_dtype(self.model))

    def _make_batch_by_signature(self) -> Batch:
        """Return the token ids, images and audio that the model's `forward` takes, and labels that fit its class."""
        names, batch_size = inspect.signature(self.model.forward).parameters, self.batch_size
        ids = torch.zeros(batch_size, self.context_length, dtype=torch.int64)
        batch: Batch = {}
        if "input_ids" in names:
            batch["input_ids"] = ids
            if "decoder_input_ids" in names and getattr(self.model.config, "is_encoder_decoder", False):
                batch["decoder_input_ids"] = ids.clone()
        if "pixel_values" in names:
            batch["pixel_values"] = self._make_pixels()
            self.assumptions.append(f"Images of {tuple(batch['pixel_values'].shape[1:])}.")
        if "input_values" in names:
            batch["input_values"] = torch.zeros(batch_size, _SOUND_SAMPLES, dtype=_find_parameter_dtype(self.model))
            self.assumptions.append(f"Sound of {_SOUND_SAMPLES:,} samples each: 10 s at 16 kHz.")
        if not batch:
            raise UsageError(
                "what the model takes as input is not known here",
                value=f"{type(self.model).__name__}: {', '.join(list(names)[:4])}",
                hint="give a file.py:factory whose model has a method memprof_inputs",
            )
        class_name = type(self.model).__name__
        if class_name.endswith(("ForSequenceClassification", "ForAudioClassification")):
            batch["labels"] = torch.zeros(batch_size, dtype=torch.int64)
        elif class_name.endswith("ForTokenClassification"):
            batch["labels"] = ids.clone()
        elif class_name.endswith("ForSemanticSegmentation"):
            batch["labels"] = torch.zeros(batch_size, *batch["pixel_values"].shape[2:], dtype=torch.int64)
        return batch

    def _make_speech_batch(self) -> Batch:
        """Return input_features, float (batch, mel bins, frames), and labels (batch, length)."""
        config: Any = self.model.config
        frames = 2 * config.max_source_positions
        length = min(self.context_length, config.max_target_positions)
        features = torch.zeros(self.batch_size, config.num_mel_bins, frames, dtype=_find_parameter_dtype(self.model))
        labels = torch.zeros(self.batch_size, length, dtype=torch.int64)
        self.assumptions.append(f"Audio of {frames:,} frames and labels of {length:,} tokens per sample.")
        return {"input_features": features, "labels": labels}

    def _find_custom_maker(self) -> Callable[[], Batch]:
        model: Any = self.model
        if hasattr(model, "memprof_inputs"):
            return lambda: dict(model.memprof_inputs(self.batch_size, self.context_length))
        names = list(inspect.signature(model.forward).parameters)
        if not names:
            raise UsageError("the model's forward takes no input", value=type(model).__name__, hint=INPUTS_HINT)
        layers = (module for module in model.modules() if isinstance(module, _INPUT_LAYERS))
        first_layer = next((layer for layer in layers if any(True for _ in layer.parameters(recurse=False))), None)
        label_name = next((name for name in names if name in ("labels", "targets", "target", "y")), None)
        if isinstance(first_layer, nn.Embedding):
            self.assumptions.append(f"Input {names[0]!r}: token ids ({self.batch_size}, {self.context_length}).")

            def make_token_batch() -> Batch:
                ids = torch.zeros(self.batch_size, self.context_length, dtype=torch.int64)
                return {names[0]: ids, **({label_name: ids.clone()} if label_name else {})}

            return make_token_batch
        if isinstance(first_layer, nn.Conv2d):
            self.takes_tokens = False
            shape: tuple[int, ...] = (self.batch_size, first_layer.in_channels, 224, 224)
        elif isinstance(first_layer, nn.Linear):
            shape = (self.batch_size, self.context_length, first_layer.in_features)
        elif isinstance(first_layer, nn.RNNBase):
            shape = (self.batch_size, self.context_length, first_layer.input_size)
            if not first_layer.batch_first:
                shape = (shape[1], shape[0], shape[2])
        else:
            problem = "what the model takes as input cannot be told from its first layer"
            raise UsageError(problem, value=type(model).__name__, hint=INPUTS_HINT)
        self.assumptions.append(
            f"Input {names[0]!r}: {_find_parameter_dtype(model)} {shape}, from the model's first layer."
        )
        return lambda: {names[0]: torch.zeros(shape, dtype=_find_parameter_dtype(model))}


_SOUND_SAMPLES = 160_000
_INPUT_LAYERS = (nn.Embedding, nn.Linear, nn.Conv2d, nn.RNNBase)


def _find_parameter_dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
