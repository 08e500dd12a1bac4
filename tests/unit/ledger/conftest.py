"""A builder of small traces."""

from __future__ import annotations

import pytest

from tests.unit.traces import TraceBuilder


@pytest.fixture
def build() -> TraceBuilder:
    return TraceBuilder(None)
