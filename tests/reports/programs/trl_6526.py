# huggingface/trl#6526: a divergence of two models has log-probabilities of all words several times.
# resolved: the loss in chunks of tokens.
# run: --gpu a100-40gb
# first: logits-explosion | does-not-fit
# fix: in chunks of tokens
# also: fragmentation logits-explosion float32-upcast
import math

import torch
from torch.nn import functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM


def config(hidden, layers):
    return Qwen2Config(
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        use_cache=False,
    )


def generalized_jsd_loss(student_logits, teacher_logits, labels, beta=0.5, temperature=0.9):
    student_log_probs = F.log_softmax(student_logits / temperature, dim=-1)  # <- cause
    teacher_log_probs = F.log_softmax(teacher_logits / temperature, dim=-1)
    mixture = torch.logsumexp(
        torch.stack([student_log_probs + math.log(1 - beta), teacher_log_probs + math.log(beta)]), dim=0
    )
    kl_teacher = F.kl_div(mixture, teacher_log_probs, reduction="none", log_target=True)
    kl_student = F.kl_div(mixture, student_log_probs, reduction="none", log_target=True)
    jsd = beta * kl_teacher + (1 - beta) * kl_student
    mask = labels != -100
    return jsd[mask].sum() / mask.sum()


student = Qwen2ForCausalLM(config(896, 12)).to(torch.bfloat16).cuda()
teacher = Qwen2ForCausalLM(config(1536, 14)).to(torch.bfloat16).cuda().eval()
teacher.requires_grad_(False)
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-5)

for step in range(5):
    ids = torch.randint(0, 151_936, (6, 2048), device="cuda")
    labels = ids.clone()
    labels[:, :256] = -100
    student_out = student(input_ids=ids)
    with torch.no_grad():
        teacher_out = teacher(input_ids=ids)
    loss = generalized_jsd_loss(student_out.logits[:, :-1], teacher_out.logits[:, :-1], labels[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
