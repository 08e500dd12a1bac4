"""Public programs that fine-tune a model that was downloaded before, by a configuration of their own repository.

The weights are holes in a file: memprof reads shapes alone, so that a model of any size takes no room on the disk.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from pathlib import Path

import torch

from tests.programs import data
from tests.programs.program import Program

WORDS, HIDDEN, INNER, KEYS, LAYERS = 128_256, 2048, 8192, 512, 16  # Of Llama-3.2-1B.
_LLAMA = "meta-llama/Llama-3.2-1B"
_LONG = 600  # Words of a text: more than a sample may have, so that each is as long as it may be.


def _litgpt(home: Path) -> None:
    """What `litgpt download meta-llama/Llama-3.2-1B` leaves, and a few instructions."""
    folder = home / "checkpoints" / _LLAMA
    data.word_tokenizer(folder)
    config = {
        "name": "Llama-3.2-1B", "block_size": 131_072, "vocab_size": 128_000, "padded_vocab_size": WORDS,
        "n_layer": LAYERS, "n_head": 32, "n_query_groups": 8, "n_embd": HIDDEN, "intermediate_size": INNER,
        "rotary_percentage": 1.0, "parallel_residual": False, "bias": False, "norm_class_name": "RMSNorm",
        "mlp_class_name": "LLaMAMLP", "rope_base": 500_000,
    }  # fmt: skip
    data.write_json(folder / "model_config.yaml", config)
    layer = {
        "norm_1": (HIDDEN,), "norm_2": (HIDDEN,), "attn.qkv": (HIDDEN + 2 * KEYS, HIDDEN),
        "attn.proj": (HIDDEN, HIDDEN),
        "mlp.fc_1": (INNER, HIDDEN), "mlp.fc_2": (INNER, HIDDEN), "mlp.proj": (HIDDEN, INNER),
    }  # fmt: skip
    shapes = {"lm_head": (WORDS, HIDDEN), "transformer.wte": (WORDS, HIDDEN), "transformer.ln_f": (HIDDEN,)}
    shapes |= {f"transformer.h.{n}.{name}": shape for n in range(LAYERS) for name, shape in layer.items()}
    hole = home / "hole"
    with hole.open("wb") as file:
        file.truncate(2 * WORDS * HIDDEN)
    weights = {
        f"{name}.weight": torch.from_file(str(hole), size=math.prod(shape), dtype=torch.bfloat16).view(shape)
        for name, shape in shapes.items()
    }
    with torch.serialization.skip_data():
        torch.save(weights, folder / "lit_model.pth")
    rows = [{"instruction": data.words(30, seed), "output": data.words(_LONG, seed)} for seed in range(400)]
    data.write_json(home / "alpaca.json", rows)


def _safetensors(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    head, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        head[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(head).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def _torchtune(home: Path) -> None:
    """What `tune download meta-llama/Llama-3.2-1B-Instruct` leaves, with a token for each byte, and some texts."""
    layer = {
        "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (KEYS, HIDDEN), "self_attn.v_proj": (KEYS, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER), "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (WORDS, HIDDEN), "model.norm": (HIDDEN,)}
    shapes |= {f"model.layers.{n}.{name}": shape for n in range(LAYERS) for name, shape in layer.items()}
    folder = home / "Llama-3.2-1B-Instruct"
    folder.mkdir()
    _safetensors(folder / "model.safetensors", {f"{name}.weight": shape for name, shape in shapes.items()})
    config = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": HIDDEN, "head_dim": 64}
    data.write_json(folder / "config.json", {**config, "model_type": "llama"})
    ranks = "".join(f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256))
    (folder / "tokenizer.model").write_text(ranks, encoding="utf-8")
    rows = [{"text": data.words(_LONG, seed)} for seed in range(100)]
    (home / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


# Which are run by their own commands; figures that their authors published of them stand in docs/programs.md.
FINETUNING = (
    Program(
        name="litgpt lora",
        repository="Lightning-AI/litgpt",
        commit="26857050",
        command=f"litgpt/__main__.py finetune_lora checkpoints/{_LLAMA} "
        "--config config_hub/finetune/llama-3.2-1B/lora.yaml --data JSON --data.json_path alpaca.json",
        data=_litgpt,
        path=(".",),
        options="--gpu a10g",
        layers=True,
    ),
    Program(
        name="torchtune full",
        repository="pytorch/torchtune",
        commit="bd2a0fc7c",
        command="recipes/full_finetune_single_device.py --config recipes/configs/llama3_2/1B_full_single_device.yaml "
        "output_dir=out checkpointer.checkpoint_dir=Llama-3.2-1B-Instruct "
        "checkpointer.checkpoint_files=[model.safetensors] tokenizer.path=Llama-3.2-1B-Instruct/tokenizer.model "
        "tokenizer.max_seq_len=2048 dataset._component_=torchtune.datasets.text_completion_dataset "
        "dataset.source=json dataset.data_files=texts.jsonl dataset.column=text dataset.packed=True "
        "optimizer._component_=torch.optim.AdamW optimizer.fused=True enable_activation_checkpointing=True",
        data=_torchtune,
        path=(".",),
        options="--gpu a100-40gb",
        findings=frozenset({"logits-explosion"}),
        seconds=300,
        layers=True,
    ),
)
