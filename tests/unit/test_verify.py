"""What `verify` and `rebuild_kv_cache` see to on one rank, before it votes: bytes, places, and whose cache it is."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from fastdeploy_rl.errors import ChecksumMismatchError, FastDeployRLError, StepFailedError
from fastdeploy_rl.memory.tensor_view import TensorView
from fastdeploy_rl.update.steps import RankUpdate, UpdateStep
from tests.unit.test_undo import MODES, OLDS, Rig, Silent, flip, rig, run


class Flip(Silent):
    """One bit of the bound parameter `up` turns around right after `install`."""

    def end(self, step: UpdateStep, update: RankUpdate) -> None:
        if step.name == "install":
            flip(update.runner.bound()["up"])


def check_refused(rank: Rig, observer: Silent, error: type[FastDeployRLError], reason: str) -> None:
    """And undone, to the byte."""
    before = rank.standing()
    command = rank.command(rank.publish(), observer)
    with pytest.raises(error, match=reason):
        run(command)
    vars(rank.runner).pop("bind", None)
    command.undo()
    assert rank.standing() == before
    rank.update()


@pytest.mark.parametrize("old", OLDS)
def test_a_byte_of_a_copy_that_changed_after_the_install_is_found_before_the_vote(tmp_path: Path, old: str) -> None:
    with rig(tmp_path, "copy") as rank:
        rank.go_to(old)
        check_refused(rank, Flip(), ChecksumMismatchError, "1 parameters do not hold the bytes .*, first up")


@pytest.mark.parametrize("old", OLDS)
def test_a_parameter_that_is_bound_elsewhere_than_staged_is_found_before_the_vote(tmp_path: Path, old: str) -> None:
    """A runner that forgets one, or keeps the old one, made no version."""
    with rig(tmp_path, "alias") as rank:
        former: Mapping[str, TensorView] = {}

        def forget(views: Mapping[str, TensorView]) -> None:
            rank.runner._bound = {name: view for name, view in views.items() if name != "up"}

        def keep(views: Mapping[str, TensorView]) -> None:
            rank.runner._bound = dict(views) | ({"up": former["up"]} if former else {"more": views["up"]})

        for bind in (forget, keep):
            rank.go_to(old)
            former = rank.runner.bound()
            rank.runner.bind = bind  # type: ignore[method-assign]
            check_refused(rank, Silent(), StepFailedError, "parameters are not bound to version")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("old", OLDS)
def test_a_filled_parameter_with_other_bytes_than_its_view_is_found_before_the_vote(
    tmp_path: Path, mode: str, old: str
) -> None:
    with rig(tmp_path, mode) as rank:
        rank.go_to(old)
        is_broken = True

        def verify_bound() -> None:
            nonlocal is_broken
            if is_broken:
                is_broken = False  # what is put back is whole
                raise ChecksumMismatchError("up does not hold what was copied into it")

        rank.runner.verify_bound = verify_bound  # type: ignore[method-assign]
        check_refused(rank, Silent(), ChecksumMismatchError, "up does not hold")


def test_parameters_that_are_filled_are_bound_again_where_others_would_be_overwritten(tmp_path: Path) -> None:
    """To write into the memory of their views would change nothing that the engine computes with."""
    with rig(tmp_path, "copy") as rank:
        rank.runner.fills_parameters = True
        rank.update()
        first = rank.runner.bound()["up"]
        binds = rank.runner.calls.count("bind")
        rank.update()
        assert rank.runner.calls.count("bind") == binds + 1
        assert not first.same_place(rank.runner.bound()["up"])


@pytest.mark.parametrize("mode", MODES)
def test_the_kv_cache_is_filled_anew_under_the_digest_of_the_new_weights(tmp_path: Path, mode: str) -> None:
    with rig(tmp_path, mode) as rank:
        for old in OLDS:
            rank.go_to(old)
            published = rank.publish()
            command = rank.command(published)
            run(command)
            command.retire()
            assert rank.runner.kv_digest == published.manifest.content_digest
