"""Files as a transport: the common suite."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from transport_suite import Connect, TransportSuite, soon, weights

from fastdeploy_rl.coverage import ParameterSpec
from fastdeploy_rl.publish.fastdeploy_files import write_model_state, write_version
from fastdeploy_rl.sources.base import SourceConfig
from fastdeploy_rl.sources.described import DescribedFiles
from fastdeploy_rl.sources.foreign_files import find_foreign
from fastdeploy_rl.transport import files
from fastdeploy_rl.transport.base import Offer
from fastdeploy_rl.transport.files import FileTransport

DTYPES = {"uint8": "U8", "float32": "F32"}


class FilePublisher:
    """Writes files in place of those that were there, as FastDeploy's trainers do."""

    def __init__(self, directory: Path) -> None:
        specs = [ParameterSpec(name, DTYPES[str(v.dtype)], v.shape, None) for name, v in weights(0).items()]
        self._directory = directory
        config = SourceConfig(directory / "channel", directory, parameters=tuple(specs))
        self.files = DescribedFiles(config, lambda _: find_foreign(config), str(directory))

    def publish(self, state_dict: dict[str, Any], *, step: int) -> Offer:
        write_model_state(self._directory, state_dict, rank=0, gpu=0)
        write_version(self._directory, step)
        return FileTransport(self.files.offer).offer(None, deadline_ns=1 << 62)


@pytest.fixture
def publisher(tmp_path: Path) -> FilePublisher:
    return FilePublisher(tmp_path)


@pytest.fixture
def connect(publisher: FilePublisher, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connect]:
    with ExitStack() as stack:

        def connected(bucket_bytes: int) -> FileTransport:
            monkeypatch.setattr(files, "_CHUNK_BYTES", bucket_bytes)
            transport = FileTransport(publisher.files.offer, 2)
            stack.callback(transport.close)
            return transport

        yield connected


class TestFileTransport(TransportSuite):
    def test_a_version_can_be_asked_for_by_name(self, connect: Connect, publisher: FilePublisher) -> None:  # type: ignore[override]
        """Only the one that is there: the files of a newer one took their place."""
        published = publisher.publish(weights(1), step=1)
        assert connect(1 << 20).offer(published.version, deadline_ns=soon()) == published
