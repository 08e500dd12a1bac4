"""denoising-diffusion-pytorch's own Trainer on a folder of images."""

from denoising_diffusion_pytorch import GaussianDiffusion, Trainer, Unet

model = Unet(dim=32, dim_mults=(1, 2, 4), flash_attn=False)
diffusion = GaussianDiffusion(model, image_size=64, timesteps=100, sampling_timesteps=10)
Trainer(
    diffusion,
    "pictures",
    train_batch_size=8,
    train_num_steps=4,
    gradient_accumulate_every=2,
    ema_decay=0.995,
    amp=True,
    calculate_fid=False,
    num_samples=4,
    save_and_sample_every=2,
).train()
