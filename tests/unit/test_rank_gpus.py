"""The device of each rank, as CUDA_VISIBLE_DEVICES and Paddle's launcher say it."""

import pytest

from fastdeploy_rl.errors import ConfigurationError
from fastdeploy_rl.sources.rank_gpus import listed_gpus, rank_gpus


def environment(monkeypatch: pytest.MonkeyPatch, visible: str | None, selected: str | None) -> None:
    for name, value in (("CUDA_VISIBLE_DEVICES", visible), ("FLAGS_selected_gpus", selected)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("visible", "selected", "rank", "expected"),
    [
        (None, None, 1, [(0, "0"), (1, "1")]),
        (None, "3", 1, [(2, "2"), (3, "3")]),
        ("6, 7", None, 0, [(0, "6"), (1, "7")]),
        ("4,5,6,7", "3", 1, [(2, "6"), (3, "7")]),
        ("GPU-1a,MIG-2b", "0", 0, [(0, "GPU-1a"), (1, "MIG-2b")]),
        ("4,5", "0,1", 1, [(0, "4"), (1, "5")]),
    ],
)
def test_ranks_have_the_devices_that_follow_each_other(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, selected: str | None, rank: int, expected: list[object]
) -> None:
    environment(monkeypatch, visible, selected)
    assert list(rank_gpus(rank, 2)) == expected
    assert listed_gpus(rank, 2) == (tuple(expected) if visible is not None else None)


@pytest.mark.parametrize(
    ("visible", "selected", "said"),
    [
        ("4", None, "'4' does not list the devices of all 2 ranks, of which rank 1 has number 1"),
        ("", None, "does not list the devices"),
        ("4,5", "2", "of which rank 1 has number 2"),
        ("4,5", "0", "of which rank 1 has number 0"),
        (None, "0", "None does not list the devices"),
    ],
)
def test_a_list_that_lacks_a_rank_is_refused(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, selected: str | None, said: str
) -> None:
    environment(monkeypatch, visible, selected)
    assert listed_gpus(1, 2) is None
    with pytest.raises(ConfigurationError, match=said):
        rank_gpus(1, 2)
