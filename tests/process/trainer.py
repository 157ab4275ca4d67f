"""A trainer that publishes for one load strategy: the publisher, and the line that the strategy adds to it."""

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from fastdeploy_rl.publish.publisher import Published, WeightPublisher
from fastdeploy_rl.publish.snapshot_writer import SnapshotWriter
from fastdeploy_rl.publish.weight_server import WeightServer

_SOON_S = 30.0


class Trainer:
    """Lives in a `with`. What it publishes can be had over the strategy when `publish` returns."""

    def __init__(self, strategy: str, channel: Path) -> None:
        self.channel = channel
        self.strategy = strategy
        self.publisher = WeightPublisher(channel)
        self.server: WeightServer | None = None
        self._snapshots: SnapshotWriter | None = None
        self._stack = ExitStack()

    def __enter__(self) -> "Trainer":
        with ExitStack() as stack:
            stack.enter_context(self.publisher)
            if self.strategy == "rsync":
                self.server = stack.enter_context(WeightServer(self.channel))
            if self.strategy == "ipc_snapshot":
                self._snapshots = stack.enter_context(SnapshotWriter(self.channel, keep=3))
            self._stack = stack.pop_all()
        return self

    def publish(self, tensors: dict[str, Any], **more: Any) -> Published:
        published = self.publisher.publish(tensors, **more)
        if self._snapshots is not None:
            self._snapshots.write(published)
            self._snapshots.wait(_SOON_S)
        return published

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()
