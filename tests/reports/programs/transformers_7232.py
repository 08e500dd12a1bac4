# huggingface/transformers#7232: an evaluation by the Trainer joins all logits on the GPU.
# resolved: eval_accumulation_steps, or preprocess_logits_for_metrics, which keeps the argmax.
# run: --gpu rtx-3060-12gb
# first: evaluation-accumulates | does-not-fit
# also: fragmentation logits-explosion
# fix: eval_accumulation_steps | preprocess_logits_for_metrics
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Sentences(Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        tokens = torch.randint(0, 30522, (256,))
        return {"input_ids": tokens, "labels": tokens}


def score(prediction):
    return {"right": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


model = GPT2LMHeadModel(GPT2Config(vocab_size=30522, n_embd=128, n_layer=2, n_head=2, n_positions=256))
arguments = TrainingArguments(tempfile.mkdtemp(), per_device_eval_batch_size=16, report_to="none", disable_tqdm=True)
trainer = Trainer(model, arguments, eval_dataset=Sentences(), compute_metrics=score)  # <- cause
trainer.evaluate()  # <- cause
