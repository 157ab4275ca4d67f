"""A trainer on a channel of its own, for the suites of whatever fetches from it or reads there."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fastdeploy_rl.publish.publisher import WeightPublisher


@pytest.fixture
def channel(tmp_path: Path) -> Path:
    return tmp_path / "channel"


@pytest.fixture
def publisher(channel: Path) -> Iterator[WeightPublisher]:
    """Two arenas at most: a version that somebody holds too long is in its way."""
    with WeightPublisher(channel, max_arenas=2) as publisher:
        yield publisher
