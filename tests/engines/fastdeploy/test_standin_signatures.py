"""The stand-ins are called as FastDeploy's own classes are: parameter by parameter, against a source tree of it."""

from collections.abc import Iterator

import pytest

from tests.engines.fastdeploy.real_tree import RealPeer, skip_without_real_tree

skip_without_real_tree()


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPeer]:
    with RealPeer(tmp_path_factory.mktemp("fastdeploy")) as peer:
        yield peer


def test_every_stand_in_takes_what_fastdeploys_own_takes(peer: RealPeer) -> None:
    found = peer.call("real_signatures.differences")
    assert found["differences"] == {}
    assert found["compared"] > 50


def test_every_field_of_the_configuration_is_one_of_fastdeploys(peer: RealPeer) -> None:
    assert peer.call("real_signatures.unknown_fields") == []
