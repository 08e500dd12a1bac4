"""T5 or BART trained by Seq2SeqTrainer, which generates in its evaluation."""

import argparse
import math

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GenerationConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)

parser = argparse.ArgumentParser()
parser.add_argument("--arch", default="t5", choices=("t5", "bart"))
parser.add_argument("--hidden", type=int, default=32)
parser.add_argument("--layers", type=int, default=1)
parser.add_argument("--vocab", type=int, default=100)
parser.add_argument("--length", type=int, default=12)
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--max_steps", type=int, default=4)
parser.add_argument("--attn", default="sdpa")
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--never_ends", action="store_true", help="no token ends a generated text")
parser.add_argument("--num_beams", type=int, default=2)
parser.add_argument("--output", default="out-seq2seq")
args = parser.parse_args()
torch.manual_seed(3)


class Pairs(Dataset):
    def __init__(self, count, seed):
        generator = np.random.default_rng(seed)
        self.rows = [
            {
                "input_ids": generator.integers(4, args.vocab, args.length),
                "attention_mask": np.ones(args.length, dtype=np.int64),
                "labels": generator.integers(4, args.vocab, args.length // 2),
            }
            for _ in range(count)
        ]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def compute_metrics(prediction):
    predictions, labels = prediction
    predictions = np.where(predictions != -100, predictions, 0)
    lengths = (predictions != 0).sum(axis=-1)
    return {"gen_len": float(np.mean(lengths)), "labels": int((labels != -100).sum())}


if args.arch == "t5":
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=args.vocab, d_model=args.hidden, d_kv=8, d_ff=4 * args.hidden, num_layers=args.layers,
            num_heads=4, decoder_start_token_id=0, dropout_rate=args.dropout,
            attn_implementation=args.attn,
        )
    )  # fmt: skip
else:
    model = BartForConditionalGeneration(
        BartConfig(
            vocab_size=args.vocab, d_model=args.hidden, encoder_layers=args.layers, decoder_layers=args.layers,
            encoder_ffn_dim=4 * args.hidden, decoder_ffn_dim=4 * args.hidden, encoder_attention_heads=4,
            decoder_attention_heads=4, dropout=args.dropout, attn_implementation=args.attn,
            max_position_embeddings=max(64, args.length), forced_eos_token_id=None if args.never_ends else 2,
        )
    )  # fmt: skip
training_args = Seq2SeqTrainingArguments(
    output_dir=args.output,
    per_device_train_batch_size=args.batch,
    per_device_eval_batch_size=args.batch,
    max_steps=args.max_steps,
    predict_with_generate=True,
    generation_config=GenerationConfig(
        max_new_tokens=6, num_beams=args.num_beams, decoder_start_token_id=model.config.decoder_start_token_id,
        eos_token_id=None if args.never_ends else model.config.eos_token_id, pad_token_id=model.config.pad_token_id,
    ),
    eval_strategy="steps",
    eval_steps=2,
    save_strategy="no",
    logging_steps=1,
    optim="adafactor",
    report_to="none",
)  # fmt: skip
trainer = Seq2SeqTrainer(
    model=model,
    args=training_args,
    train_dataset=Pairs(32, 0),
    eval_dataset=Pairs(3, 1),
    compute_metrics=compute_metrics,
)
result = trainer.train()
metrics = trainer.evaluate()
print("evaluated:", metrics)
predicted = trainer.predict(Pairs(2, 2))
print("predicted:", predicted.predictions.shape)
if not (math.isfinite(result.training_loss) and math.isfinite(metrics["eval_loss"])):
    raise SystemExit("the loss is not finite")
