"""LoRA adapters on a frozen model in bfloat16, trained by Trainer with gradient checkpointing, then merged."""

import argparse
import math

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Trainer,
    TrainingArguments,
)

parser = argparse.ArgumentParser()
parser.add_argument("--hidden", type=int, default=32)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--vocab", type=int, default=128)
parser.add_argument("--length", type=int, default=16)
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--rank", type=int, default=4)
parser.add_argument("--max_steps", type=int, default=4)
parser.add_argument("--attn", default="sdpa")
parser.add_argument("--precision", default="bf16", choices=("bf16", "fp32"))
parser.add_argument("--dropout", type=float, default=0.05)
parser.add_argument("--merge", action="store_true")
parser.add_argument("--output", default="out-lora")
args = parser.parse_args()


def word_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "</s>": 1, "<unk>": 2, **{f"w{n}": n for n in range(3, args.vocab)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


config = Qwen2Config(
    vocab_size=args.vocab, hidden_size=args.hidden, intermediate_size=2 * args.hidden, num_hidden_layers=args.layers,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=max(64, args.length),
)  # fmt: skip
torch.manual_seed(0)
dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=args.attn)
model.enable_input_require_grads()
model = get_peft_model(
    model,
    LoraConfig(
        r=args.rank, lora_alpha=16, lora_dropout=args.dropout, task_type=TaskType.CAUSAL_LM,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
    ),
)  # fmt: skip
model.print_trainable_parameters()
tokenizer = word_tokenizer()
texts = [" ".join(f"w{3 + (7 * row + place) % (args.vocab - 3)}" for place in range(args.length)) for row in range(32)]
rows = [tokenizer(text, truncation=True, max_length=args.length) for text in texts]
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=args.output,
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        max_steps=args.max_steps,
        learning_rate=2e-4,
        bf16=args.precision == "bf16",
        logging_steps=1,
        save_strategy="steps",
        save_steps=2,
        report_to="none",
    ),
    train_dataset=rows,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
result = trainer.train()
model.save_pretrained(args.output)
if args.merge:
    base = AutoModelForCausalLM.from_config(config, dtype=dtype).to("cuda")
    merged = PeftModel.from_pretrained(base, args.output).merge_and_unload()
    prompt = tokenizer(texts[0], return_tensors="pt").to("cuda")
    print(tokenizer.decode(merged.generate(**prompt, max_new_tokens=4, do_sample=False)[0]))
if not math.isfinite(result.training_loss):
    raise SystemExit("the loss is not finite")
