"""Whose allocator a run is replayed by: the torch release, its settings, and where these came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from memprof.allocator.caching import CachingAllocator
from memprof.allocator.config import AllocatorConfig, config_from_environment, parse_config
from memprof.allocator.releases import LATEST, Release, release_for
from memprof.trace.facts import AllocatorFacts

_PROGRAM = "the program"


@dataclass(frozen=True, slots=True)
class Settings:
    """Release and configuration of the allocator.
    Raises UsageError: the configuration asks for another allocator (backend:cudaMallocAsync)."""

    torch: str | None = None  # version of torch; None: not known, the newest that memprof knows is taken
    config: AllocatorConfig = field(default_factory=AllocatorConfig)
    origin: str | None = None  # flag or environment variable that `config` came from; None: torch's defaults

    def __post_init__(self) -> None:
        """Refuse what cannot be replayed before the run, not after it."""
        CachingAllocator(None, self.config, self.release)

    @property
    def release(self) -> Release:
        """Return the torch release whose rules and messages apply."""
        return LATEST if self.torch is None else release_for(self.torch)

    @classmethod
    def resolve(
        cls, alloc_conf: str | None, torch: str | None, *, flag: str = "--alloc-conf", environ: Mapping[str, str]
    ) -> Settings:
        """Return what torch `torch` would take: `alloc_conf` if it is given, else the environment's.
        Raises UsageError: torch would refuse the configuration."""
        release = cls(torch).release
        if alloc_conf is not None:
            return cls(torch, parse_config(alloc_conf, release, origin=flag), flag)
        return cls(torch, *config_from_environment(environ, release))

    @property
    def facts(self) -> AllocatorFacts:
        """Return what the trace keeps of them."""
        return AllocatorFacts(self.torch, self.alloc_conf, self.origin)

    @classmethod
    def from_facts(cls, facts: AllocatorFacts | None) -> Settings:
        """Return the reverse of `facts`; the newest release's defaults for a capture that does not say."""
        found = cls() if facts is None else cls(facts.torch)
        if facts is None or facts.alloc_conf is None:
            return found
        origin = facts.alloc_conf_from
        return cls(facts.torch, parse_config(facts.alloc_conf, found.release, origin=origin or "alloc_conf"), origin)

    @property
    def alloc_conf(self) -> str | None:
        """Return the configuration's text; None: torch's defaults."""
        return self.config.text if self.origin is not None else None

    def changed(self, alloc_conf: str) -> Settings:
        """Return the settings once the program has set `alloc_conf` itself: what it does not name has its default.
        Raises UsageError: torch would refuse it."""
        return type(self)(self.torch, parse_config(alloc_conf, self.release, origin=_PROGRAM), _PROGRAM)

    def __str__(self) -> str:
        name = f"torch {self.torch}" if self.torch else f"torch {'.'.join(map(str, LATEST.version))} (not recorded)"
        if self.origin is None:
            return f"{name} with its default settings"
        return f"{name} with the settings {self.alloc_conf!r} (from {self.origin})"


class CurrentSettings:
    """The settings of a run that is going on, which its program may read and change."""

    def __init__(self, settings: Settings) -> None:
        self.now = settings

    def get(self) -> str:
        """Return the text that was set last, as torch does."""
        return self.now.alloc_conf or ""

    def set(self, alloc_conf: str) -> None:
        """Take settings as torch does. Raises UsageError: torch would refuse them."""
        self.now = self.now.changed(alloc_conf)
