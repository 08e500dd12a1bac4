"""mamba_ssm (state-spaces/mamba@v2.3.2.post1): the first Mamba's scan and layer, norms, and its language model."""

from memprof.stubs.mamba_ssm import models, scan

__all__ = ["models", "scan"]
