"""Streams, events and what else of torch.cuda programs take for classes."""

import pytest
import torch

import memprof


@pytest.fixture(autouse=True)
def gpu():
    with memprof.virtual_gpu("h100-80gb") as gpu:
        yield gpu


@pytest.mark.parametrize("stream", ["torch.Stream()", "torch.Stream('cuda')", "torch.cuda.Stream()"])
def test_streams_of_every_kind(stream):
    made = eval(stream, {"torch": torch})
    assert isinstance(made, torch.Stream) and made.device.type == "cuda"
    with made:
        made.wait_stream(torch.cuda.current_stream())
        event = made.record_event()
        event.wait()
    assert isinstance(event, torch.cuda.Event) and isinstance(event, torch.Event) and event.query()


def test_the_current_stream_is_a_stream():
    for current in (torch.cuda.current_stream, torch.accelerator.current_stream, torch.cuda.default_stream):
        assert isinstance(current(), torch.cuda.Stream)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert not isinstance(torch.cuda.Event(), torch.Stream)


def test_streams_of_the_host_stay_so():
    assert torch.Stream("cpu").device.type == "cpu"


def test_events_take_no_time():
    first, second = torch.Event("cuda"), torch.Event(enable_timing=True)
    first.record()
    second.record()
    assert first.elapsed_time(second) == 1.0


@pytest.mark.parametrize("name", ["MemPool", "Stream", "Event", "CUDAGraph", "ExternalStream", "graph", "device",
                                  "StreamContext", "BoolTensor", "FloatTensor"])  # fmt: skip
def test_classes_stay_classes(name):
    kind = getattr(torch.cuda, name)
    assert isinstance(kind, type)
    assert (kind | None) is not None
    assert not isinstance(3, kind)


def test_what_is_asked_before_bfloat16_is_taken():
    assert torch.cuda.nccl.version() >= (2, 27)
    assert torch.version.cuda is not None and torch.backends.cuda.is_built()


MIB = 1 << 20


def taken(num_bytes):
    """Memory that is taken and released: it stays reserved for the stream that it was taken on."""
    torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    return torch.cuda.memory_reserved()


def test_each_stream_has_memory_of_its_own():
    side = torch.cuda.Stream()
    assert taken(20 * MIB) == 20 * MIB == taken(20 * MIB)
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side != torch.cuda.default_stream()
        assert taken(20 * MIB) == 40 * MIB == taken(20 * MIB)
        with torch.cuda.stream(torch.cuda.default_stream()):
            assert taken(20 * MIB) == 40 * MIB
        assert torch.accelerator.current_stream() == side
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert taken(40 * MIB) == 80 * MIB
    torch.cuda.set_stream(side)
    assert taken(40 * MIB) == 120 * MIB
    with torch.cuda.stream(None), torch.cuda.ExternalStream(1 << 40):
        assert taken(40 * MIB) == 160 * MIB
    assert torch.cuda.current_stream() == side


def test_new_streams_come_from_a_pool():
    """32 for each of four priorities, in turn (c10/cuda/CUDAStream.cpp)."""
    for priority in (0, -1, -3):
        made = [torch.cuda.Stream(priority=priority) for _ in range(33)]
        assert len(set(made)) == 32 and made[0] == made[32]
    assert (torch.cuda.Stream(priority=-9).priority, torch.cuda.Stream(priority=7).priority) == (-3, 0)
    assert len({torch.cuda.Stream(priority=priority) for priority in (0, -1, -2, -3, 0)}) == 5


def test_a_workspace_of_cublas_for_each_stream():
    x = torch.ones(64, 64, device="cuda")
    before = torch.cuda.memory_allocated()
    x @ x
    with torch.cuda.stream(torch.cuda.Stream()):
        x @ x
    assert torch.cuda.memory_allocated() == before + 2 * 32 * MIB
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() == before
    x @ x
    assert torch.cuda.memory_allocated() == before + 32 * MIB


def figures():
    """MiB that are in use, also by streams that other memory was lent to; and MiB reserved."""
    torch.empty(1, device="cuda")  # each request looks which work is done
    stats = torch.cuda.memory_stats()
    return stats["active_bytes.all.current"] // MIB, stats["reserved_bytes.large_pool.current"] // MIB


def lend(side):
    """Take memory on a side stream, lend it to the current one, and give it up."""
    with torch.cuda.stream(side):
        made = torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
    made.record_stream(torch.cuda.current_stream())


WAITS = {
    "synchronize": lambda side: torch.cuda.synchronize(),
    "stream": lambda side: torch.cuda.current_stream().synchronize(),
    "event": lambda side: torch.cuda.current_stream().record_event().synchronize(),
    "query": lambda side: torch.cuda.current_stream().query(),
    "item": lambda side: torch.zeros(1, device="cuda").item(),
    "from the GPU": lambda side: torch.ones(3, device="cuda").cpu(),
    "to the GPU": lambda side: torch.ones(3).to("cuda"),
    "into the GPU": lambda side: torch.ones(3, device="cuda").copy_(torch.ones(3)),
    "mask": lambda side: torch.ones(3, device="cuda")[torch.ones(3, dtype=torch.bool, device="cuda")],
    "another stream": lambda side: side.wait_stream(torch.cuda.current_stream()),
    "another stream's event": lambda side: torch.cuda.current_stream().record_event().wait(side),
    "a wait for it": lambda side: (side.wait_stream(torch.cuda.current_stream()), side.synchronize()),
    "empty_cache": lambda side: torch.cuda.empty_cache(),
}
IN_VAIN = {
    "nothing": lambda side: None,
    "side stream": lambda side: side.synchronize(),
    "not blocking": lambda side: torch.ones(3).to("cuda", non_blocking=True),
    "on the GPU": lambda side: torch.ones(3, device="cuda").to(torch.float64),
    "new event": lambda side: torch.cuda.Event().synchronize(),
}


@pytest.mark.parametrize("wait", WAITS)
def test_lent_memory_is_free_once_the_borrower_was_waited_for(wait):
    side = torch.cuda.Stream()
    lend(side)
    assert figures() == (40, 40)
    WAITS[wait](side)
    assert figures()[0] == 0


@pytest.mark.parametrize("wait", IN_VAIN)
def test_what_waits_for_something_else_frees_nothing(wait):
    side, early = torch.cuda.Stream(), torch.cuda.current_stream().record_event()
    lend(side)
    IN_VAIN[wait](side)
    early.synchronize()
    assert figures() == (40, 40)
    lend(side)
    assert figures() == (80, 80)


def test_lent_to_its_own_stream_it_is_free_at_once():
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        lend(side)
    assert figures() == (0, 40)


class Prefetcher:
    """NVIDIA's: the next batch is copied on a stream of its own."""

    def __init__(self, batches, *, records):
        self.batches, self.records, self.stream = iter(batches), records, torch.cuda.Stream()
        self.preload()

    def preload(self):
        self.batch = next(self.batches, None)
        if self.batch is not None:
            with torch.cuda.stream(self.stream):
                self.batch = self.batch.cuda(non_blocking=True)

    def next(self):
        torch.cuda.current_stream().wait_stream(self.stream)
        batch = self.batch
        if batch is not None and self.records:
            batch.record_stream(torch.cuda.current_stream())
        self.preload()
        return batch


@pytest.mark.parametrize(("records", "reads", "most"), [(False, False, 2), (True, True, 3), (True, False, 6)])
def test_a_prefetcher(records, reads, most):
    """Two batches at a time; a lent one is there until the next wait, and where nobody ever waits, until the end."""
    prefetcher = Prefetcher([torch.empty(10 * MIB, dtype=torch.uint8) for _ in range(6)], records=records)
    batch = prefetcher.next()
    while batch is not None:
        total = batch.float().sum()
        if reads:
            total.item()
        del batch
        batch = prefetcher.next()
    torch.cuda.synchronize()
    held = [segment for segment in torch.cuda.memory_snapshot() if segment["stream"] == prefetcher.stream.stream_id]
    assert sum(segment["total_size"] for segment in held) == most * 10 * MIB


def test_a_backward_node_takes_memory_on_the_stream_of_its_forward():
    """torch/csrc/autograd/engine.cpp, evaluate_function; so do its hooks, and recomputation inside it."""
    side, seen = torch.cuda.Stream(), []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(torch.cuda.current_stream())
            with torch.cuda.stream(torch.cuda.default_stream()):
                seen.append(torch.cuda.current_stream())
            return gradient

    x = torch.ones(8, device="cuda", requires_grad=True)
    with torch.cuda.stream(side):
        y = Looks.apply(x)
        checkpointed = torch.utils.checkpoint.checkpoint(Looks.apply, y, use_reentrant=False)
    (Looks.apply(checkpointed)).sum().backward()
    default = torch.cuda.default_stream()
    assert seen == [default, default, side, default, side, default]
    assert torch.cuda.current_stream() == default


def test_gradients_of_a_side_stream_are_of_that_stream():
    side = torch.cuda.Stream()
    x = torch.ones(10 * MIB, dtype=torch.uint8, device="cuda").half().requires_grad_()
    with torch.cuda.stream(side):
        y = x * 2
    y.sum().backward()
    own = {segment["stream"] for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]
           if block["state"] == "active_allocated" and block["size"] == 20 * MIB}  # fmt: skip
    assert own == {0, side.stream_id}
    del y
    held = [segment for segment in torch.cuda.memory_snapshot() if segment["stream"] == side.stream_id]
    assert [block["size"] for s in held for block in s["blocks"] if block["state"] == "active_allocated"] == [20 * MIB]


def test_the_engine_lends_gradients_to_the_stream_of_a_node(gpu):
    """torch/csrc/autograd/input_buffer.cpp: a gradient of another stream is recorded on the consumer's, which waits."""
    side = torch.cuda.Stream()
    x = torch.ones(10 * MIB, device="cuda", requires_grad=True)
    a = x * 2
    with torch.cuda.stream(side):
        b = a * 3
    c = b * 5
    del a, b
    c.backward(torch.ones_like(c))
    trace, number = gpu.trace, side.stream_id
    made = [trace.op(trace.storages[use.storage]) for use in trace.uses]
    assert made == ["aten.mul"] * 2 and [use.stream for use in trace.uses] == [number, 0]
    assert [{one.stream for one in wait.done} for wait in trace.waits] == [{0}, {0, number}]
    assert gpu.report().streams.upper_bound_bytes == gpu.report().streams.lower_bound_bytes + 40 * MIB


def test_what_hooks_do_on_streams_of_their_own_is_not_lent(gpu):
    side = torch.cuda.Stream()
    x = torch.ones(MIB, device="cuda", requires_grad=True)

    def elsewhere(gradient):
        with torch.cuda.stream(side):
            gradient.clone()

    y = x * 2
    y.register_hook(elsewhere)
    y.sum().backward()
    assert gpu.trace.uses == []
