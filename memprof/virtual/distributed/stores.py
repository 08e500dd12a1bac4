"""Stores of keys that processes share: alone there are the keys of this one, together those of all that run."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from memprof.torch_private import distributed
from memprof.virtual.limits import unsupported_error
from memprof.virtual.peers.channel import Channel

_HashStore: Any = distributed.HashStore.get(None)
_Store: Any = getattr(dist, "Store", object)


def kind(channel: Channel | None) -> Any:
    """Return the class that stands for TCPStore and FileStore."""
    if channel is None:
        return _Own

    class SharedStore(_Shared):
        def __init__(self, host_or_file: Any = "", port: Any = 0, *args: Any, **options: Any) -> None:
            of = options.get("host_name", options.get("file_name", host_or_file))
            assert channel is not None
            super().__init__(channel, f"{of}:{options.get('port', port)}")

    return SharedStore


class _Own(_HashStore or object):  # type: ignore[misc]
    """A store of this rank alone: what other processes would put there is absent."""

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


class _Shared(_Store):  # type: ignore[misc]
    """A store that all running ranks share. C++ calls these too, some by names of its own."""

    def __init__(self, channel: Channel, name: str) -> None:
        super().__init__()
        self._channel, self._name = channel, name

    def _ask(self, operation: str, key: str, *more: Any) -> Any:
        return self._channel.store(operation, f"{self._name}/{key}", *more)

    def set(self, key: str, value: Any) -> None:
        self._ask("set", key, _bytes(value))

    def get(self, key: str) -> Any:
        return self._ask("get", key)

    def add(self, key: str, amount: int) -> Any:
        """Add to a number, and return the sum."""
        return self._ask("add", key, amount)

    def append(self, key: str, value: Any) -> None:
        self._ask("append", key, _bytes(value))

    def compare_set(self, key: str, expected: Any, desired: Any) -> Any:
        """Put there if `expected` is there; what is there then."""
        return self._ask("compare_set", key, _bytes(expected), _bytes(desired))

    def check(self, keys: list[str]) -> bool:
        return all(self._ask("check", key) for key in keys)

    def wait(self, keys: list[str], *timeout: Any) -> None:
        for key in keys:
            self._ask("get", key)

    def multi_get(self, keys: list[str]) -> list[Any]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", key))

    def num_keys(self) -> int:
        return int(self._ask("count", ""))

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: Any) -> None:
        """Do nothing: nobody waits for what cannot come."""

    def clone(self) -> Any:
        return self

    deleteKey, getNumKeys, hasExtendedApi = delete_key, num_keys, has_extended_api  # noqa: N815


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
