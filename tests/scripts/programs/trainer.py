"""A causal language model trained by Hugging Face's Trainer, with evaluation, metrics and checkpoints."""

import argparse
import math

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

parser = argparse.ArgumentParser()
parser.add_argument("--arch", default="llama", choices=("llama", "gpt2"))
parser.add_argument("--hidden", type=int, default=32)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--vocab", type=int, default=128)
parser.add_argument("--length", type=int, default=16)
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--max_steps", type=int, default=4)
parser.add_argument("--eval_steps", type=int, default=2)
parser.add_argument("--precision", default="bf16", choices=("bf16", "fp16", "fp32"))
parser.add_argument("--gradient_checkpointing", action="store_true")
parser.add_argument("--optim", default="adamw_torch")
parser.add_argument("--attn", default="sdpa")
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--output", default="out-trainer")
args = parser.parse_args()
set_seed(7)


class RandomTokens(Dataset):
    """What a tokenizer would have made: lists of different lengths, padded by the collator below."""

    def __init__(self, count, seed):
        generator = np.random.default_rng(seed)
        lengths = generator.integers(args.length // 2, args.length + 1, count)
        lengths[0] = args.length
        self.rows = [generator.integers(1, args.vocab, length).tolist() for length in lengths]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": list(self.rows[index])}


def collate(rows):
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(name, fill):
        return torch.tensor([row[name] + [fill] * (longest - len(row[name])) for row in rows])

    ids = padded("input_ids", 0)
    return {"input_ids": ids, "labels": padded("labels", -100), "attention_mask": (ids != 0).long()}


def compute_metrics(prediction):
    predictions, labels = prediction
    predictions, labels = predictions[:, :-1], labels[:, 1:]
    chosen = labels != -100
    return {"accuracy": float((predictions[chosen] == labels[chosen]).mean())}


def preprocess_logits_for_metrics(logits, labels):
    return logits.argmax(dim=-1)


if args.arch == "llama":
    config = LlamaConfig(
        vocab_size=args.vocab, hidden_size=args.hidden, intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers, num_attention_heads=4, num_key_value_heads=2, use_cache=False,
        max_position_embeddings=max(args.length, 64), attn_implementation=args.attn, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
else:
    config = GPT2Config(
        vocab_size=args.vocab, n_embd=args.hidden, n_layer=args.layers, n_head=4, n_positions=max(args.length, 64),
        use_cache=False, attn_implementation=args.attn, resid_pdrop=args.dropout, embd_pdrop=args.dropout,
        attn_pdrop=args.dropout,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)

training_args = TrainingArguments(
    output_dir=args.output,
    per_device_train_batch_size=args.batch,
    per_device_eval_batch_size=args.batch,
    gradient_accumulation_steps=args.accumulate,
    gradient_checkpointing=args.gradient_checkpointing,
    max_steps=args.max_steps,
    learning_rate=1e-3,
    lr_scheduler_type="cosine",
    warmup_steps=1,
    bf16=args.precision == "bf16",
    fp16=args.precision == "fp16",
    optim=args.optim,
    eval_strategy="steps",
    eval_steps=args.eval_steps,
    save_strategy="steps",
    save_steps=args.eval_steps,
    save_total_limit=1,
    load_best_model_at_end=True,
    metric_for_best_model="eval_loss",
    logging_steps=1,
    logging_first_step=True,
    dataloader_num_workers=args.workers,
    dataloader_pin_memory=True,
    report_to="none",
    remove_unused_columns=False,
)
trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=RandomTokens(64, 0),
    eval_dataset=RandomTokens(5, 1),
    data_collator=collate,
    compute_metrics=compute_metrics,
    preprocess_logits_for_metrics=preprocess_logits_for_metrics,
)
result = trainer.train(resume_from_checkpoint=args.resume or None)
trainer.log_metrics("train", result.metrics)
metrics = trainer.evaluate()
print("evaluated:", metrics)
trainer.save_model()
trainer.save_state()
if not (math.isfinite(result.training_loss) and math.isfinite(metrics["eval_loss"])):
    raise SystemExit("the loss is not finite")
