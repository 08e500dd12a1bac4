"""Preference optimisation by TRL's DPOTrainer: the model, and a frozen copy of it beside it."""

import argparse
import math

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--hidden", type=int, default=32)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--vocab", type=int, default=128)
parser.add_argument("--length", type=int, default=24)
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--max_steps", type=int, default=4)
parser.add_argument("--precompute", action="store_true")
parser.add_argument("--output", default="out-dpo")
args = parser.parse_args()


def word_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "</s>": 1, "<unk>": 2, **{f"w{n}": n for n in range(3, args.vocab)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def words(start, count):
    return " ".join(f"w{3 + (start + place) % (args.vocab - 3)}" for place in range(count))


torch.manual_seed(1)
config = LlamaConfig(
    vocab_size=args.vocab, hidden_size=args.hidden, intermediate_size=2 * args.hidden, num_hidden_layers=args.layers,
    num_attention_heads=4, num_key_value_heads=4, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    max_position_embeddings=max(64, args.length),
)  # fmt: skip
model, reference = LlamaForCausalLM(config), LlamaForCausalLM(config)
reference.load_state_dict(model.state_dict())
pairs = Dataset.from_dict(
    {
        "prompt": [words(row, 4 + row % 3) for row in range(24)],
        "chosen": [words(2 * row, 3 + row % 5) for row in range(24)],
        "rejected": [words(3 * row, 5 + row % 4) for row in range(24)],
    }
)
trainer = DPOTrainer(
    model=model,
    ref_model=reference,
    args=DPOConfig(
        output_dir=args.output,
        beta=0.1,
        max_length=args.length,
        precompute_ref_log_probs=args.precompute,
        per_device_train_batch_size=args.batch,
        per_device_eval_batch_size=args.batch,
        max_steps=args.max_steps,
        bf16=True,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=4,
        report_to="none",
    ),
    train_dataset=pairs,
    eval_dataset=pairs.select(range(3)),
    processing_class=word_tokenizer(),
)
result = trainer.train()
if not math.isfinite(result.training_loss):
    raise SystemExit("the loss is not finite")
print("rewards:", {name: value for name, value in trainer.state.log_history[0].items() if "reward" in name})
