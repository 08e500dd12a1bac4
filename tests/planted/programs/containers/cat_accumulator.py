# Predictions are joined to a tensor that grows: while it is joined, the old and the new one are there.
# fits: no
# exit: 3
# step: 24
# run: --gpu-vram 2 --alloc-conf expandable_segments:True
# why: 1622 MiB less weights 64, batch and predictions 2 * 32, and workspaces 17 leave 1477 for 2 k - 1 batches of 32:
#      k = 23. With segments that expand nothing is lost between the sizes.
import torch

torch.manual_seed(0)
model = torch.nn.Linear(4096, 4096, bias=False).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
seen = torch.empty(0, 4096, device="cuda")
for index in range(100):
    batch = torch.randn(2048, 4096, device="cuda")
    predictions = model(batch)
    predictions.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    seen = torch.cat([seen, predictions.detach()])  # <- culprit
print(seen.shape)
