"""Private names of DataLoader, whose workers are simulated in the training process."""

from __future__ import annotations

from memprof.torch_private.names import PrivateName

BaseDataLoaderIter = PrivateName("torch.utils.data.dataloader:_BaseDataLoaderIter")
DatasetKind = PrivateName("torch.utils.data.dataloader:_DatasetKind")
MultiProcessingDataLoaderIter = PrivateName("torch.utils.data.dataloader:_MultiProcessingDataLoaderIter")
sharding_worker_init_fn = PrivateName("torch.utils.data.dataloader:_sharding_worker_init_fn")
default_collate_fn_map = PrivateName("torch.utils.data._utils:collate.default_collate_fn_map")
pin_memory = PrivateName("torch.utils.data._utils:pin_memory.pin_memory")
WorkerInfo = PrivateName("torch.utils.data._utils:worker.WorkerInfo")
worker_info = PrivateName("torch.utils.data._utils:worker._worker_info")
generate_state = PrivateName(
    "torch.utils.data._utils:worker._generate_state", fallback="NumPy's random state is not seeded for a worker"
)
