"""Case study 3, before and after, and what holds of its guide: python recipes/3-precision-and-vram-guide/run.py."""

from __future__ import annotations

import textwrap

import audit
import precision
from specs import GPUS, SIZES

from memprof.units import format_bytes


def main() -> None:
    """Print the guide's advice, one by one, its tables as they come out of runs, and the audit."""
    print("Llama-3.2-1B, forwards of 16 samples of 512 tokens, float32, RTX 3060 Ti: the guide's advice\n")
    print(f"{'':<36}{'allocated':>10}{'needed':>10}  verdict")
    for step in audit.steps():
        verdict, peak = step.document.verdict, step.document.peak
        says = "fits" if verdict.fits else f"out of memory in {verdict.oom_stage}"
        needed = format_bytes(verdict.required_bytes)
        print(f"{step.advice:<36}{format_bytes(peak.allocated_bytes):>10}{needed:>10}  {says}")
    sizes, gpus, deviations = audit.sizes(), audit.gpus(), precision.measured()
    print("\nThe guide's sizes, and what a forward needs on the GPU\n")
    print(f"{'':<10}{'guide':>8}{'weights':>10}{'guide GPU':>12}{'1 sample':>10}{'16 samples':>12}")
    for size in sizes:
        guide, gpu = f"{SIZES[size.dtype]} GB", f"{GPUS[size.dtype]} GB"
        weights, one, sixteen = (format_bytes(value) for value in (size.weight_bytes, size.one, size.sixteen))
        print(f"{size.dtype:<10}{guide:>8}{weights:>10}{gpu:>12}{one:>10}{sixteen:>12}")
    print("\nThe guide's GPUs: 16 samples, the largest batch of 16, 32, 64 and 128, and training one sample\n")
    for gpu in gpus:
        fits, trains = ("fits" if gpu.fits else "does not fit"), ("trains" if gpu.trains else "does not train")
        print(
            f"{gpu.name:<22}{format_bytes(gpu.total_bytes):>10}  {gpu.dtype:<9}"
            f"{format_bytes(gpu.needed_bytes):>10}  {fits:<13}batch {gpu.largest:>3}  {trains}"
        )
    print("\nPrecision against accuracy: five small models on the same inputs, measured on this CPU against float32\n")
    print(f"{'':<14}{'layers':>16}{'logits':>9}{'same likeliest token':>23}")
    for name, found in deviations.items():
        layers = f"{found.least:.2%} to {found.most:.2%}"
        same = f"{found.agreement[0]} of {found.agreement[1]}"
        print(f"{name:<14}{layers:>16}{found.logits:>9.2%}{same:>23}")
    print("\nWhat holds of the guide\n")
    for claim in audit.claims(sizes, gpus, deviations):
        print(f"* {claim.text}: {claim.verdict.upper()}")
        print(textwrap.fill(claim.right, 100, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False))


if __name__ == "__main__":
    main()
