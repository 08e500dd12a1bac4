"""Key-value stores of torch.distributed: local to a rank that runs alone, shared by ranks that run together."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from memprof.torch_private import distributed
from memprof.virtual.limits import unsupported_error
from memprof.virtual.peers.channel import Channel

_HashStore: Any = distributed.HashStore.get(None)
_StoreBase: Any = getattr(dist, "Store", object)


def make_store_class(channel: Channel | None) -> Any:
    """Return the class that replaces TCPStore and FileStore: shared through `channel`, or local if it is None."""
    if channel is None:
        return _LocalStore

    class SharedStore(_ChannelStore):
        def __init__(self, host_or_file: Any = "", port: Any = 0, *args: Any, **options: Any) -> None:
            location = options.get("host_name", options.get("file_name", host_or_file))
            assert channel is not None
            super().__init__(channel, f"{location}:{options.get('port', port)}")

    return SharedStore


class _LocalStore(_HashStore or object):  # type: ignore[misc]
    """A store of a rank that runs alone; a wait for a key of another process raises an error."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()

    def get(self, key: str) -> Any:
        self.wait([key])
        return super().get(key)

    def wait(self, keys: list[str], *timeout: Any) -> None:
        if not self.check(keys):
            raise unsupported_error(
                f"waits for {keys} of another process in a store", "have this rank put it there as well"
            )


class _ChannelStore(_StoreBase):  # type: ignore[misc]
    """A store that all running ranks share through the parent process."""

    def __init__(self, channel: Channel, name: str) -> None:
        super().__init__()
        self._channel, self._name = channel, name

    def _call(self, operation: str, key: str, *args: Any) -> Any:
        return self._channel.call_store(operation, f"{self._name}/{key}", *args)

    def set(self, key: str, value: Any) -> None:
        self._call("set", key, _to_bytes(value))

    def get(self, key: str) -> Any:
        return self._call("get", key)

    def add(self, key: str, amount: int) -> Any:
        """Add `amount` to the integer value of `key`, and return the sum."""
        return self._call("add", key, amount)

    def append(self, key: str, value: Any) -> None:
        self._call("append", key, _to_bytes(value))

    def compare_set(self, key: str, expected: Any, desired: Any) -> Any:
        """Set `key` to `desired` if its value is `expected`; return the value of `key` afterwards."""
        return self._call("compare_set", key, _to_bytes(expected), _to_bytes(desired))

    def check(self, keys: list[str]) -> bool:
        return all(self._call("check", key) for key in keys)

    def wait(self, keys: list[str], *timeout: Any) -> None:
        for key in keys:
            self._call("get", key)

    def multi_get(self, keys: list[str]) -> list[Any]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def delete_key(self, key: str) -> bool:
        return bool(self._call("delete", key))

    def num_keys(self) -> int:
        return int(self._call("count", ""))

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: Any) -> None:
        """Do nothing: the store has no timeouts."""

    def clone(self) -> Any:
        return self

    deleteKey, getNumKeys, hasExtendedApi = delete_key, num_keys, has_extended_api  # noqa: N815


def _to_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
