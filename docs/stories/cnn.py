"""A ResNet-50 of 1,000 classes, with transformers' sizes: images of 224 x 224."""

import transformers


def build():
    """The model, as any factory of yours would give it."""
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=1000))
