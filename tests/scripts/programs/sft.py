"""Supervised fine-tuning by TRL's SFTTrainer: a dataset of texts, packed or padded, with LoRA or without."""

import argparse
import math

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--hidden", type=int, default=32)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--vocab", type=int, default=128)
parser.add_argument("--length", type=int, default=16)
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--max_steps", type=int, default=4)
parser.add_argument("--packing", action="store_true")
parser.add_argument("--lora", action="store_true")
parser.add_argument("--output", default="out-sft")
args = parser.parse_args()


def word_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "</s>": 1, "<unk>": 2, **{f"w{n}": n for n in range(3, args.vocab)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


torch.manual_seed(1)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=args.vocab, hidden_size=args.hidden, intermediate_size=2 * args.hidden,
        num_hidden_layers=args.layers, num_attention_heads=4, num_key_value_heads=4, pad_token_id=0, eos_token_id=1,
        bos_token_id=None, max_position_embeddings=max(64, args.length),
    )
)  # fmt: skip
texts = [
    " ".join(f"w{3 + (11 * row + place) % (args.vocab - 3)}" for place in range(4 + row % args.length))
    for row in range(40)
]
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(
        output_dir=args.output,
        max_length=args.length,
        packing=args.packing,
        per_device_train_batch_size=args.batch,
        per_device_eval_batch_size=args.batch,
        max_steps=args.max_steps,
        learning_rate=1e-4,
        bf16=True,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=Dataset.from_dict({"text": texts}),
    eval_dataset=Dataset.from_dict({"text": texts[:5]}),
    processing_class=word_tokenizer(),
    peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM") if args.lora else None,
)
result = trainer.train()
metrics = trainer.evaluate()
print("evaluated:", metrics)
trainer.save_model(args.output)
if not (math.isfinite(result.training_loss) and math.isfinite(metrics["eval_loss"])):
    raise SystemExit("the loss is not finite")
