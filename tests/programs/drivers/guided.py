"""guided-diffusion's U-Net and its loss, in half precision as its scripts have it."""

import torch
from guided_diffusion.gaussian_diffusion import (
    GaussianDiffusion,
    LossType,
    ModelMeanType,
    ModelVarType,
    get_named_beta_schedule,
)
from guided_diffusion.unet import UNetModel

model = UNetModel(
    image_size=64, in_channels=3, model_channels=64, out_channels=6, num_res_blocks=1,
    attention_resolutions=(4,), channel_mult=(1, 2, 3), num_head_channels=32, use_scale_shift_norm=True,
    resblock_updown=True, use_checkpoint=True,
).cuda()  # fmt: skip
diffusion = GaussianDiffusion(
    betas=get_named_beta_schedule("cosine", 1000),
    model_mean_type=ModelMeanType.EPSILON,
    model_var_type=ModelVarType.LEARNED_RANGE,
    loss_type=LossType.RESCALED_MSE,
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(3):
    times = torch.randint(0, 1000, (4,), device="cuda")
    losses = diffusion.training_losses(model, torch.randn(4, 3, 64, 64, device="cuda"), times)
    losses["loss"].mean().backward()
    optimizer.step()
    optimizer.zero_grad()
