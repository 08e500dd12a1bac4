# KevinMusgrave/pytorch-metric-learning#203: NT-Xent compares all positive with all negative pairs at once.
# resolved: fewer pairs, given as a tuple of indices, or a loop over parts of the batch.
# run: --gpu rtx-2080-ti
# first: does-not-fit
# fix: fewer pairs | in parts | in chunks
# not: activation-checkpointing compile amp-bfloat16
import torch


def list_pairs(labels):
    same = labels[:, None] == labels[None, :]
    other = ~same
    same.fill_diagonal_(False)
    return torch.where(same), torch.where(other)


def contrast(embeddings, labels, temperature=0.5):
    (anchor, positive), (anchor2, negative) = list_pairs(labels)
    similarity = embeddings @ embeddings.T
    positives = similarity[anchor, positive].unsqueeze(1) / temperature
    negatives = similarity[anchor2, negative] / temperature
    own = anchor[:, None] == anchor2[None, :]  # <- cause
    negatives = negatives * own
    largest = torch.maximum(positives, negatives.max(1, keepdim=True).values)
    numerator = torch.exp(positives - largest).squeeze(1)
    return -torch.log(numerator / (torch.exp(negatives - largest).sum(1) + numerator)).mean()


first, second = torch.randn(256, 128).cuda().requires_grad_(), torch.randn(256, 128).cuda().requires_grad_()
labels = torch.cat([torch.zeros(256), torch.arange(1, 257)]).long().cuda()
loss = contrast(torch.cat([first, second]), labels)
loss.backward()
