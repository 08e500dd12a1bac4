# roboflow/rf-detr#1490: each CUDA graph of an input size has a memory pool of its own.
# resolved: one pool for all captures.
# run: --gpu-vram 5
# first: graph-pools
# also: fragmentation evaluation-accumulates
# fix: one pool for all
import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    def __init__(self, dim, heads=16):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, n, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, vocab=32000, dim=1024, layers=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.Sequential(*[Layer(dim) for _ in range(layers)])
        self.norm = nn.LayerNorm(dim)

    def forward(self, ids):
        return self.norm(self.layers(self.embed(ids)))[:, -1]


class GraphRunner:
    def __init__(self, model, sizes, length=64):
        self.model, self.length, self.graphs = model, length, {}
        for size in sizes:
            self.graphs[size] = self.capture(size)

    @torch.inference_mode()
    def capture(self, size):
        ids = torch.zeros(size, self.length, dtype=torch.long, device="cuda")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.model(ids)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # <- cause
            out = self.model(ids)
        return graph, ids, out

    def __call__(self, ids):
        size = min(s for s in self.graphs if s >= len(ids))
        graph, static, out = self.graphs[size]
        static[: len(ids)].copy_(ids)
        graph.replay()
        return out[: len(ids)].clone()


if __name__ == "__main__":
    model = Model().eval().half().cuda()
    runner = GraphRunner(model, range(8, 257, 8))
    for n in (3, 77, 200):
        print(n, runner(torch.randint(0, 32000, (n, 64), device="cuda")).shape)
