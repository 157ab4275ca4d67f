"""FastDeploy's own worker loop, control calls and plugin loader, around our runner and around its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.fastdeploy.real_tree import RealPeer, skip_without_real_tree
from tests.process.numpy_engine import free_port

skip_without_real_tree()

NORMAL, CLEARED = 0, -2


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPeer]:
    with RealPeer(tmp_path_factory.mktemp("stock")) as peer:
        yield peer


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPeer]:
    with RealPeer(tmp_path_factory.mktemp("ours"), FD_PLUGINS="fastdeploy_rl") as peer:
        yield peer


def test_fastdeploys_loader_gives_our_entry_point_where_it_is_named(ours: RealPeer) -> None:
    module = "fastdeploy_rl.engines.fastdeploy.plugin"
    assert ours.call("real_loop.plugins_where", allowed="fastdeploy_rl") == {"fastdeploy_rl": module}
    assert ours.call("real_loop.plugins_where", allowed="other") == {}
    assert ours.call("real_loop.plugins_where", allowed=None) == {}


def test_fastdeploys_worker_has_taken_our_runner(ours: RealPeer) -> None:
    found = ours.call("real_loop.active_runner")
    assert found == {"is_fastdeploys": False, "is_one_of_them": True, "error": ""}


def test_a_plugin_that_cannot_work_refuses_the_start_and_says_why(ours: RealPeer) -> None:
    assert "OSError: no space left" in ours.call("real_loop.broken_plugin")


@pytest.mark.parametrize("kind", ["stock", "ours"])
@pytest.mark.parametrize("stays_in_check", [False, True])
def test_a_trainer_updates_clears_and_updates(
    stock: RealPeer, ours: RealPeer, tmp_path: Path, kind: str, stays_in_check: bool
) -> None:
    peer = stock if kind == "stock" else ours
    asked = {"kind": kind, "path": str(tmp_path), "port": free_port(), "stays_in_check": stays_in_check}
    live = {"word": NORMAL, "caches": True, "loop": "runs"}
    assert peer.call("real_loop.update_clear_update", **asked) == [
        live | {"values": [2.0]},
        {"word": CLEARED, "values": [None], "caches": False, "loop": "runs"},
        live | {"values": [3.0]},
        {"decoded": [3.0, 3.0]},
    ]


@pytest.mark.parametrize("stays_in_check", [False, True])
def test_an_update_that_is_refused_while_cleared_leaves_it_cleared_and_the_next_one_works(
    ours: RealPeer, tmp_path: Path, stays_in_check: bool
) -> None:
    asked = {"path": str(tmp_path), "port": free_port(), "stays_in_check": stays_in_check}
    refused, taken = ours.call("real_loop.refused_while_cleared", **asked)
    assert refused == {
        "word": CLEARED,
        "values": [None],
        "caches": False,
        "loop": "runs",
        "outcome": "rejected",
    }
    assert taken == {"word": NORMAL, "values": [3.0], "caches": True, "loop": "runs", "outcome": "done"}


def test_a_controller_updates_a_decoding_engine_without_the_word(ours: RealPeer, tmp_path: Path) -> None:
    found = ours.call("real_loop.commanded_over_the_board", path=str(tmp_path), port=free_port())
    live = {"word": NORMAL, "values": [2.0], "caches": True, "loop": "runs"}
    assert found == live | {"version": "1.2", "outcome": "done", "after a refusal": live}


def test_fastdeploys_control_calls_update_sleep_and_wake(ours: RealPeer, tmp_path: Path) -> None:
    updated, slept, both, cache, awake, refused, unknown = ours.call(
        "real_loop.v1_commands", path=str(tmp_path), port=free_port()
    )
    assert (updated["code"], updated["values"], updated["result"]["version"]) == (200, [2.0], "1.2")
    assert (slept["code"], slept["values"]) == (200, [None])
    assert (both["code"], both["values"], both["caches"]) == (200, [None], False)
    assert (cache["code"], cache["values"], cache["caches"]) == (200, [None], True)
    assert (awake["code"], awake["values"], awake["caches"]) == (200, [2.0], True)
    assert (refused["code"], refused["values"], refused["caches"]) == (500, [2.0], True)
    assert "1.9" in refused["text"]
    assert unknown["code"] == 400
