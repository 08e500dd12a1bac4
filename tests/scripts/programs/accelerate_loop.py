"""A loop of one's own on Hugging Face Accelerate: mixed precision, accumulation, gathered metrics, saved state."""

import argparse
import math
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm.auto import tqdm
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

parser = argparse.ArgumentParser()
parser.add_argument("--hidden", type=int, default=32)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--vocab", type=int, default=128)
parser.add_argument("--length", type=int, default=16)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--rows", type=int, default=24)
parser.add_argument("--mixed_precision", default="fp16", choices=("no", "fp16", "bf16"))
parser.add_argument("--attn", default="sdpa")
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--output", default="out-accelerate")
args = parser.parse_args()

accelerator = Accelerator(mixed_precision=args.mixed_precision, gradient_accumulation_steps=2)
accelerator.print(f"device {accelerator.device}, {accelerator.num_processes} process, {accelerator.mixed_precision}")
set_seed(42)


def dataset(count):
    ids = torch.randint(1, args.vocab, (count, args.length))
    return TensorDataset(ids, torch.ones_like(ids), torch.randint(0, 2, (count,)))


train = DataLoader(dataset(args.rows), batch_size=args.batch, shuffle=True)
evaluation = DataLoader(dataset(args.rows // 2 + 1), batch_size=args.batch)
model = BertForSequenceClassification(
    BertConfig(
        vocab_size=args.vocab, hidden_size=args.hidden, intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers, num_attention_heads=4, max_position_embeddings=max(64, args.length),
        attn_implementation=args.attn, hidden_dropout_prob=args.dropout, attention_probs_dropout_prob=args.dropout,
    )
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
scheduler = get_linear_schedule_with_warmup(optimizer, 2, args.epochs * len(train))
model, optimizer, train, evaluation, scheduler = accelerator.prepare(model, optimizer, train, evaluation, scheduler)

bar = tqdm(total=args.epochs * len(train), disable=not accelerator.is_local_main_process)
for epoch in range(args.epochs):
    model.train()
    total = 0
    for ids, mask, labels in train:
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
            total += loss.detach().float()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        bar.update(1)
    model.eval()
    correct, seen, losses = 0, 0, []
    for ids, mask, labels in evaluation:
        with torch.no_grad():
            output = model(input_ids=ids, attention_mask=mask, labels=labels)
        predictions, references = accelerator.gather_for_metrics((output.logits.argmax(dim=-1), labels))
        losses.append(accelerator.gather(output.loss.repeat(args.batch)))
        correct += (predictions == references).sum().item()
        seen += references.shape[0]
    eval_loss = torch.mean(torch.cat(losses)).item()
    mean = total.item() / len(train)
    accelerator.print(f"epoch {epoch}: loss {mean:.4f}, eval loss {eval_loss:.4f}, accuracy {correct / seen:.3f}")
    if seen != args.rows // 2 + 1 or not (math.isfinite(mean) and math.isfinite(eval_loss)):
        raise SystemExit("that cannot be")
    accelerator.save_state(os.path.join(args.output, f"epoch-{epoch}"))
accelerator.load_state(os.path.join(args.output, "epoch-0"))
accelerator.wait_for_everyone()
unwrapped = accelerator.unwrap_model(model)
unwrapped.save_pretrained(args.output, save_function=accelerator.save)
assert isinstance(unwrapped, nn.Module)
accelerator.end_training()
