"""What case study 3 is about: forwards of a model of 1.2B parameters on consumer GPUs, as typed specifications."""

from memprof.spec import Mode, TargetSpec

BEFORE = TargetSpec(
    model="llama-3.2-1b",
    dtype="float32",
    batch_size=16,
    context_length=512,
    mode=Mode.INFERENCE,
    gpu="rtx-3060-ti",
    alloc_conf="",
)
"""The catalog's model nearest to 1.2B, with the guide's first precision and batch. The guide names neither its model
nor the length of a sample: 512 tokens are assumed."""

AFTER = BEFORE.edit(dtype="float16")

TRAINING = BEFORE.edit(mode=Mode.TRAIN, batch_size=1)
"""What the guide leaves out: gradients and the optimizer's state."""

SIZES = {"float32": 4.8, "float16": 2.4, "bfloat16": 2.4, "int8": 1.2}
"""The guide's sizes in GB."""
GPUS = {"float32": 8, "float16": 4, "bfloat16": 4, "int8": 2}
"""The guide's GPUs for them, in GB."""

RECOMMENDED = {
    "rtx-3060-ti": "float16",
    "rtx-3070": "float16",
    "rtx-3080-10gb": "bfloat16",
    "rtx-3090": "float32",
    "rtx-4090": "float32",
    "rtx-4080": "float32",
    "v100-16gb": "float32",
    "a100-40gb": "float32",
}
"""The guide's table of GPUs, and the RTX 4080 of its workflows."""

KEPT_LAYERS = (0, 6, 11)
"""The layers that the guide's workflows look at."""

DEVIATIONS = {"float16": (0.01, 99.5), "bfloat16": (0.005, 99.8)}
"""The guide's deviation of activations and match of features, in percent."""
