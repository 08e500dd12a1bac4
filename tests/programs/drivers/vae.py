"""PyTorch-VAE's models, as its experiment.py steps them."""

import sys

import torch
from models import vae_models

sizes = {"in_channels": 3, "latent_dim": 64}
sizes |= {"VQVAE": {"in_channels": 3, "embedding_dim": 64, "num_embeddings": 512, "img_size": 64, "beta": 0.25}}.get(
    sys.argv[1], {}
)
if sys.argv[1] == "VQVAE":
    sizes.pop("latent_dim")
model = vae_models[sys.argv[1]](**sizes).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for _ in range(3):
    images = torch.randn(32, 3, 64, 64, device="cuda")
    results = model(images, labels=torch.randint(0, 10, (32,), device="cuda"))
    loss = model.loss_function(*results, M_N=0.00025)
    loss["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()
