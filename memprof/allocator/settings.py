"""The settings that a run is replayed with: the torch release, the allocator settings, and where they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from memprof.allocator.caching import CachingAllocator
from memprof.allocator.config import AllocatorConfig, config_from_environment, parse_config
from memprof.allocator.releases import LATEST, Release, parse_release
from memprof.trace.facts import AllocatorFacts

_PROGRAM_ORIGIN = "the program"


@dataclass(frozen=True, slots=True)
class Settings:
    """The torch release, and the configuration of its allocator. Raises UsageError: the configuration selects another
    allocator (backend:cudaMallocAsync)."""

    torch: str | None = None  # version of torch; None: unknown, the newest supported one is used
    config: AllocatorConfig = field(default_factory=AllocatorConfig)
    origin: str | None = None  # flag or environment variable that set `config`; None: torch's defaults

    def __post_init__(self) -> None:
        """Raise UsageError if the settings cannot be replayed."""
        CachingAllocator(None, self.config, self.release)

    @property
    def release(self) -> Release:
        """Return the torch release whose rules and messages apply; the newest if `torch` is None."""
        return LATEST if self.torch is None else parse_release(self.torch)

    @classmethod
    def resolve(
        cls,
        alloc_conf: str | None,
        torch: str | None,
        *,
        flag: str = "--alloc-conf",
        environ: Mapping[str, str],
        backend: str = "cuda",
    ) -> Settings:
        """Return the settings of version `torch`: `alloc_conf` if not None, else those in `environ` for this backend.
        Raises UsageError: torch would reject the configuration."""
        release = cls(torch).release
        if alloc_conf is not None:
            return cls(torch, parse_config(alloc_conf, release, origin=flag), flag)
        return cls(torch, *config_from_environment(environ, release, backend))

    @property
    def facts(self) -> AllocatorFacts:
        """Return the settings in the form of the trace's facts."""
        return AllocatorFacts(self.torch, self.alloc_conf, self.origin)

    @classmethod
    def from_facts(cls, facts: AllocatorFacts | None) -> Settings:
        """Return the settings of `facts`; the newest release's defaults for a capture without settings."""
        settings = cls() if facts is None else cls(facts.torch)
        if facts is None or facts.alloc_conf is None:
            return settings
        origin = facts.alloc_conf_from
        return cls(facts.torch, parse_config(facts.alloc_conf, settings.release, origin=origin or "alloc_conf"), origin)

    @property
    def alloc_conf(self) -> str | None:
        """Return the configuration as a string; None: torch's defaults."""
        return self.config.text if self.origin is not None else None

    def changed(self, alloc_conf: str) -> Settings:
        """Return the settings after the program has set `alloc_conf`; settings that are not in it get defaults. Raises
        UsageError: torch would reject the string."""
        return type(self)(self.torch, parse_config(alloc_conf, self.release, origin=_PROGRAM_ORIGIN), _PROGRAM_ORIGIN)

    def __str__(self) -> str:
        name = f"torch {self.torch}" if self.torch else f"torch {'.'.join(map(str, LATEST.version))} (not recorded)"
        if self.origin is None:
            return f"{name} with its default settings"
        return f"{name} with the settings {self.alloc_conf!r} (from {self.origin})"


class CurrentSettings:
    """The settings of a run in progress, which its program may read and change."""

    def __init__(self, settings: Settings) -> None:
        self.now = settings

    def get(self) -> str:
        """Return the current settings as a string; empty for torch's defaults."""
        return self.now.alloc_conf or ""

    def set(self, alloc_conf: str) -> None:
        """Replace the settings by those in `alloc_conf`. Raises UsageError: torch would reject the string."""
        self.now = self.now.changed(alloc_conf)
