"""Native sparse attention against the equations of its paper, token by token, and against its dense form."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import memprof
from memprof.errors import UsageError
from memprof.spec import TargetSpec
from memprof.units import GIB
from memprof.workload.attention import kernels, nsa

BATCH, SHARED, GROUP, WIDTH = 2, 2, 3, 8


def parts(tokens: int, before: int = 0) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    options = {"dtype": torch.float64, "requires_grad": True}
    query = torch.randn(BATCH, SHARED * GROUP, tokens, WIDTH, **options)
    keys, values = ([torch.randn(BATCH, SHARED, before + tokens, WIDTH, **options) for _ in range(3)] for _ in "kv")
    return query, keys, values


def compressions() -> list[nsa.Compression]:
    torch.manual_seed(1)
    made = [nsa.Compression(WIDTH, dtype=torch.float64) for _ in range(2)]
    for each in made:
        torch.nn.init.normal_(each.position)
    return made


def read_literally(query: Tensor, keys: list[Tensor], values: list[Tensor], phi: list[nsa.Compression]) -> list[Tensor]:
    """Equations 5 to 12, for one query of one head after the other, with indices from 0."""
    l, d, block, n, window = 32, 16, 64, 16, 512  # noqa: E741
    tokens = keys[0].shape[2]
    branches = [torch.zeros_like(query) for _ in range(3)]

    def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(k @ q / math.sqrt(WIDTH), 0) @ v

    def one(phi: nsa.Compression, rows: Tensor) -> Tensor:
        return phi.outer(torch.nn.functional.gelu(phi.inner((rows + phi.position).flatten())))

    for b in range(BATCH):
        for group in range(SHARED):
            k, v = ([x[b, group] for x in of] for of in (keys, values))
            starts = range(0, tokens - l + 1, d)
            short = [torch.stack([one(phi[i], x[s : s + l]) for s in starts]) for i, x in enumerate((k[0], v[0]))]
            for row in range(query.shape[2]):
                t = tokens - query.shape[2] + row
                heads = range(group * GROUP, (group + 1) * GROUP)
                whole = sum(s + l - 1 <= t for s in starts)
                importance = torch.zeros(t // block + 1, dtype=torch.float64)
                for head in heads:
                    if not whole:
                        continue
                    q = query[b, head, row]
                    p = torch.softmax(short[0][:whole] @ q / math.sqrt(WIDTH), 0)
                    branches[0][b, head, row] = p @ short[1][:whole]
                    for j in range(len(importance)):
                        for m in range(block // d):
                            for o in range(l // d):
                                i = block // d * (j + 1) - 1 - m - o
                                if 0 <= i < whole:
                                    importance[j] += p[i].detach()
                forced = {0, t // block, max(0, t // block - 1)}
                ranked = sorted(range(len(importance)), key=lambda j: (j not in forced, -float(importance[j])))
                places = [s for j in ranked[:n] for s in range(j * block, (j + 1) * block) if s <= t]
                for head in heads:
                    q = query[b, head, row]
                    branches[1][b, head, row] = mixed(q, k[1][places], v[1][places])
                    low = max(0, t - window + 1)
                    branches[2][b, head, row] = mixed(q, k[2][low : t + 1], v[2][low : t + 1])
    return branches


def test_the_kernels_are_the_equations() -> None:
    # 19 blocks of 64, so that 16 of them are a choice; only the last queries, which have it.
    query, keys, values = parts(tokens=3, before=1197)
    phi = compressions()
    with torch.no_grad():
        found = nsa.attend_branches(query, keys, values, phi[0](keys[0]), phi[1](values[0]), WIDTH**-0.5)
        for mine, literal in zip(found, read_literally(query, keys, values, phi), strict=True):
            torch.testing.assert_close(mine, literal, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("tokens", "before", "workspace"), [(150, 0, 64 << 20), (20, 0, 0), (6, 1200, 0)])
def test_forward_and_gradients_are_those_of_dense_masks(
    tokens: int, before: int, workspace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "WORKSPACE_BYTES", workspace)
    query, keys, values = parts(tokens, before)
    phi = compressions()
    leaves = [query, *keys, *values, *(p for each in phi for p in each.parameters())]
    results = []
    for eager in (False, True):
        found = nsa.attend_branches(query, keys, values, phi[0](keys[0]), phi[1](values[0]), WIDTH**-0.5, eager=eager)
        loss = sum((x * torch.arange(x.numel(), dtype=x.dtype).view_as(x).sin()).sum() for x in found)
        assert isinstance(loss, Tensor)
        results.append((found, torch.autograd.grad(loss, leaves, allow_unused=True)))
    for mine, dense in zip(results[0][0] + results[0][1], results[1][0] + results[1][1], strict=True):
        assert (mine is None) == (dense is None)
        if mine is not None:
            torch.testing.assert_close(mine, dense, rtol=1e-11, atol=1e-12)


def test_a_model_trains_with_it() -> None:
    """On the CPU, for real: all that it adds gets a gradient, and so do all three branches' projections."""
    import transformers

    from memprof.workload import attention

    attention.register("nsa")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, attn_implementation="nsa", use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    attention.adapt(model, "nsa")
    ids = torch.randint(0, 64, (2, 100))
    model(input_ids=ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    # Of keys and values, each branch has a third of the rows: heads come first, and branches within.
    grad = model.model.layers[0].self_attn.v_proj.weight.grad
    assert grad is not None and (grad.view(2, 3, 8, 32).abs().sum((0, 2, 3)) > 0).all()


def test_it_keeps_what_fused_kernels_keep() -> None:
    tokens, heads, shared, width = 4096, 16, 4, 64
    with memprof.virtual_gpu("h100-80gb") as gpu:
        options = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
        query = torch.zeros(1, heads, tokens, width, **options)
        keys, values = ([torch.zeros(1, shared, tokens, width, **options) for _ in range(3)] for _ in "kv")
        short = [torch.zeros(1, shared, 255, width, **options) for _ in range(2)]
        before = gpu.allocated_bytes
        found = nsa.attend_branches(query, keys, values, *short, scale=0.1)
        # Three outputs in bfloat16, three logsumexps in float32, and 16 numbers of blocks for each query of a group.
        assert gpu.allocated_bytes - before == tokens * (heads * 3 * (2 * width + 4) + shared * 16 * 4)
        del found
    assert gpu.report().peak.allocated_bytes < GIB  # scores of all pairs would be 0.5 GiB each


@pytest.mark.parametrize(
    ("model", "words"),
    [("gpt2", "no dropout"), ("pythia-70m", "k_proj, v_proj and o_proj"),
     ("bert-base-uncased", "causal language models"),
     ("gemma-2-2b", "caps no scores")],
)  # fmt: skip
def test_models_that_cannot_have_it_say_so(model: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        memprof.profile(TargetSpec(model=model, context_length=64, attention="nsa"))
