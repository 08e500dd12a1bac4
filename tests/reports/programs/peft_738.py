# huggingface/peft#738: adapters that are evaluated one after another all stay on the model.
# resolved: delete_adapter() after each.
# run: --gpu rtx-3060-12gb
# first: memory-growth | idle-memory
# fix: delete_adapter | delete | del
import torch
from peft import LoraConfig, get_peft_model
from torch import nn


class Base(nn.Module):
    def __init__(self, width=4096, layers=8):
        super().__init__()
        self.proj = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x):
        for proj in self.proj:
            x = torch.tanh(proj(x))
        return x


config = LoraConfig(r=256, target_modules=["proj." + str(i) for i in range(8)])
model = get_peft_model(Base().cuda(), config, adapter_name="base").eval()
with torch.no_grad():
    for number in range(24):
        model.add_adapter(f"task{number}", config)  # <- cause
        model.set_adapter(f"task{number}")
        model.cuda()
        for _ in range(2):
            score = model(torch.randn(256, 4096, device="cuda")).mean()
        print(number, score.item())
