"""Private names of torch.distributed: process groups, collectives, DTensor, FSDP and distributed checkpoints."""

from __future__ import annotations

from functools import partial

from memprof.torch_private.names import PrivateName

_c10d_name = partial(PrivateName, build="distributed")
_optional_patch = partial(
    PrivateName, fallback="torch's own function runs: the same result, slower or with a device that C++ refuses"
)
_ASKS_RANKS = "torch's own function runs, which asks ranks that do not run"

HashStore = _c10d_name("torch._C:_distributed_c10d.HashStore")
new_process_group_helper = _c10d_name("torch.distributed.distributed_c10d:_new_process_group_helper")
store_based_barrier = _c10d_name("torch.distributed.distributed_c10d:_store_based_barrier")
world = _c10d_name("torch.distributed.distributed_c10d:_world")
resolve_process_group = PrivateName(
    "torch.distributed.distributed_c10d:_resolve_process_group",
    fallback="collectives are given groups, not their names",
)

AsyncCollectiveTensor = _c10d_name("torch.distributed._functional_collectives:AsyncCollectiveTensor")
new_async_collective_tensor = _c10d_name("torch.distributed._functional_collectives:AsyncCollectiveTensor.__new__")
propagate_tensor_meta_non_cached = _optional_patch(
    "torch.distributed.tensor._sharding_prop:ShardingPropagator._propagate_tensor_meta_non_cached"
)
propagate_use_strided_shard_flag = _optional_patch(
    "torch.distributed.tensor._sharding_prop:_propagate_use_strided_shard_flag", since="2.12"
)
StridedShard = _optional_patch("torch.distributed.tensor._sharding_prop:_StridedShard", since="2.10")
tree_map_only_of_strategies = _optional_patch(
    "torch.distributed.tensor._ops.single_dim_strategy:tree_map_only", since="2.11"
)
op_dispatcher = PrivateName(
    "torch.distributed.tensor:DTensor._op_dispatcher",
    fallback="a run of several ranks that use DTensor ends with an error",
)
clear_fast_path_sharding_prop_cache = PrivateName(
    "torch.distributed.tensor.debug:_clear_fast_path_sharding_prop_cache",
    fallback="layouts are cached in Python alone, and cleared there",
    since="2.10",
)
cp_options = PrivateName(
    "torch.distributed.tensor.experimental._attention:_cp_options",
    fallback="a run with ring attention ends with an error",
)
chunk_with_empty = _optional_patch("torch.distributed.fsdp._fully_shard._fsdp_param:_chunk_with_empty")
map_param_key_to_optim_keys = PrivateName(
    "torch.distributed.fsdp._optim_utils:_map_param_key_to_optim_keys", fallback=_ASKS_RANKS
)
init_dist_wrapper = PrivateName("torch.distributed.checkpoint.utils:_DistWrapper.__init__", fallback=_ASKS_RANKS)
validate_global_plan = PrivateName(
    "torch.distributed.checkpoint.default_planner:_validate_global_plan", fallback=_ASKS_RANKS
)
