"""Files that went wrong after they were written: the next older whole version is taken where none was named, the
damaged one is refused by name, and what was live stays bitwise."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fastdeploy_rl.engines.numpy.runner import random_weights
from fastdeploy_rl.errors import ChecksumMismatchError, NoPublicationError
from fastdeploy_rl.update.client import BoardClient
from tests.process.numpy_engine import NumpyEngine
from tests.process.test_update_numpy import MODEL, as_the_engine
from tests.process.trainer import Trainer


def shard_of(channel: Path, version: str) -> Path:
    (directory,) = (channel / "snapshots").glob(f"{version}-*")
    (shard,) = directory.glob("*.safetensors")
    return shard


def flip(channel: Path, version: str) -> None:
    """One bit of the last byte, in place."""
    shard = shard_of(channel, version)
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


def cut(channel: Path, version: str) -> None:
    shard = shard_of(channel, version)
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 1)


def lose(channel: Path, version: str) -> None:
    shard_of(channel, version).unlink()


def lose_manifest(channel: Path, version: str) -> None:
    (manifest,) = shard_of(channel, version).parent.glob("manifest-*.json")
    manifest.unlink()


def change_manifest(channel: Path, version: str) -> None:
    (manifest,) = shard_of(channel, version).parent.glob("manifest-*.json")
    manifest.write_bytes(manifest.read_bytes().replace(b'"layout":"full"', b'"layout":"tp:2"'))


DAMAGES = {damage.__name__: damage for damage in (flip, cut, lose, lose_manifest, change_manifest)}
each_damage = pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)


def write_versions(channel: Path, num_versions: int, seed: int | None = None) -> None:
    """And the trainer goes. `seed`: of the same weights in each; else each has its own."""
    with Trainer("ipc_snapshot", channel) as trainer:
        for step in range(1, num_versions + 1):
            weights = random_weights(MODEL, step if seed is None else seed)
            trainer.publish(weights, step=step, convention=as_the_engine)


@each_damage
def test_an_engine_comes_up_on_the_newest_version_that_is_whole(
    tmp_path: Path, damage: Callable[[Path, str], None]
) -> None:
    """Two damaged ones in a row, and no trainer."""
    channel = tmp_path / "channel"
    write_versions(channel, 3)
    damage(channel, "1.3")
    damage(channel, "1.2")
    with (
        NumpyEngine(MODEL, channel=channel, num_ranks=2, load_strategy="ipc_snapshot") as engine,
        BoardClient(engine.port) as client,
    ):
        report = client.update()
        assert (report.outcome, report.version) == ("done", "1.1")
        assert engine.holds(random_weights(MODEL, 1))
        assert client.receipt(recompute=True).version == "1.1"


@each_damage
def test_a_damaged_version_is_refused_by_name_and_nothing_changed(
    tmp_path: Path, damage: Callable[[Path, str], None]
) -> None:
    channel = tmp_path / "channel"
    write_versions(channel, 2)
    damage(channel, "1.2")
    with (
        NumpyEngine(MODEL, channel=channel, num_ranks=2, load_strategy="ipc_snapshot") as engine,
        BoardClient(engine.port) as client,
    ):
        with pytest.raises((ChecksumMismatchError, NoPublicationError), match=r"1\.2"):
            client.update("1.2")
        assert engine.holds(random_weights(MODEL, 0))
        assert client.status().version == "0.0"
        client.update("1.1")
        assert engine.holds(random_weights(MODEL, 1))


def test_a_damaged_newer_version_leaves_what_is_live_and_is_an_error(tmp_path: Path) -> None:
    """There is nothing newer that is whole: whoever asked for something newer is told that there is none."""
    channel = tmp_path / "channel"
    write_versions(channel, 2)
    with (
        NumpyEngine(MODEL, channel=channel, num_ranks=2, load_strategy="ipc_snapshot") as engine,
        BoardClient(engine.port) as client,
    ):
        client.update("1.1")
        before = client.receipt()
        flip(channel, "1.2")
        with pytest.raises(ChecksumMismatchError, match=r"version 1\.2: the bytes read differ"):
            client.update()
        assert engine.holds(random_weights(MODEL, 1))
        assert client.receipt(recompute=True) == before
        assert client.update().version == "1.1"  # what is known to be damaged is not tried again


def test_an_older_version_of_the_same_weights_takes_the_place_of_a_damaged_one(tmp_path: Path) -> None:
    channel = tmp_path / "channel"
    write_versions(channel, 2, seed=7)
    flip(channel, "1.2")
    with (
        NumpyEngine(MODEL, channel=channel, num_ranks=1, load_strategy="ipc_snapshot") as engine,
        BoardClient(engine.port) as client,
    ):
        assert client.update().version == "1.1"
        assert engine.holds(random_weights(MODEL, 7))
