# The moving average of an auxiliary loss, of which there is no backward, goes back over all steps.
# fits: no
# exit: 3
# step: 10
# grows: 128
# run: --gpu-vram 2
# why: the graph of a step holds the batch and what sin is taken of, 128 MiB. 1622 less two weights 128, the other
#      model's output and its square's backward 5 * 64, and workspaces 17 leave 1157: 9 of 128.
import torch

main = torch.nn.Linear(4096, 4096, bias=False, device="cuda")
helper = torch.nn.Linear(4096, 4096, bias=False, device="cuda")
optimizer = torch.optim.SGD(main.parameters(), lr=0.1)
average = None
for i in range(1, 41):
    x = torch.randn(4096, 4096, device="cuda")
    auxiliary = helper(x).sin().mean()
    average = auxiliary if average is None else 0.9 * average + 0.1 * auxiliary  # <- culprit
    main(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
