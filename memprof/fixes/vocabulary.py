"""Fix vocabulary-cap: embedding and head are truncated to their first `vocab_size` rows; tied weights stay tied."""

from __future__ import annotations

from torch import nn

from memprof.errors import UsageError
from memprof.fixes.applied import Changes, check_in_range
from memprof.fixes.catalog.fix import WEIGHTS, Fix, Numerics
from memprof.fixes.chunked_loss import find_output_head


@Fix(
    name="vocabulary-cap", order=70, numerics=Numerics.DIFFERENT, saves=(*WEIGHTS, "logits and loss"),
    changes="keep only the first tokens of embedding and head",
    cost="token ids at or above the cap cannot be used any more",
    options={"vocab_size": "tokens that stay"},
    main_option="vocab_size", required=("vocab_size",), trains_another=True,
    edit="memprof.fixes.spec_edits:set_vocabulary_size",
    helps={"vocabulary-larger-than-asked": 10},
)  # fmt: skip
def install(model: nn.Module, changes: Changes, *, vocab_size: int) -> None:
    """Truncate embedding and head to `vocab_size` tokens. Raises UsageError if the model has no embedding or linear
    head, or `vocab_size` is out of range or excludes the padding token."""
    getter = getattr(model, "get_input_embeddings", None)
    embedding = (
        getter() if getter is not None else next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
    )
    if not isinstance(embedding, nn.Embedding):
        raise changes.does_not_apply("the model has no token embedding", model)
    _, head = find_output_head(model)
    if not isinstance(head, nn.Linear):
        raise changes.does_not_apply("the head is no torch.nn.Linear", head)
    for name, owner in (("embedding", embedding), ("head", head)):
        if owner._parameters.get("weight") is None:
            hint = "apply it before the weight is parametrized"
            raise changes.does_not_apply(f"the {name}'s weight is computed", owner, hint)
    old_size = embedding.num_embeddings
    check_in_range("vocab_size", vocab_size, old_size - 1)
    if embedding.padding_idx is not None and embedding.padding_idx >= vocab_size:
        hint = f"at least {embedding.padding_idx + 1:,}"
        raise UsageError("vocab_size leaves no room for the padding token", value=repr(vocab_size), hint=hint)
    # A dictionary by identity, so that tied weights are cut once.
    weights = {id(p): p for p in (embedding.weight, head.weight, head.bias) if p is not None}
    for parameter in weights.values():
        parameter.grad = None
        changes.set_data(parameter, parameter.detach()[:vocab_size].clone())
    changes.set_attribute(embedding, "num_embeddings", vocab_size)
    changes.set_attribute(head, "out_features", vocab_size)
    config = getattr(model, "config", None)
    if config is not None:
        text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
        for owner in {id(text_config): text_config, id(config): config}.values():
            if getattr(owner, "vocab_size", None) == old_size:
                changes.set_attribute(owner, "vocab_size", vocab_size)
    for module in model.modules():
        if vars(module).get("vocab_size") == old_size:
            changes.set_attribute(module, "vocab_size", vocab_size)
    changes.note(f"vocabulary: {old_size:,} tokens became {vocab_size:,}")
