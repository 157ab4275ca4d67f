"""What is told of files whose ages do not fit to their version: each sign once, and nothing where all is well."""

from pathlib import Path

import pytest

from fastdeploy_rl.errors import NoPublicationError
from fastdeploy_rl.sources.file_ages import FileAges
from fastdeploy_rl.sources.version_file import WantedVersion
from fastdeploy_rl.transport.files import FileIdentity
from fastdeploy_rl.version import WeightVersion

S = 10**9


def file(name: str, written_s: int) -> FileIdentity:
    return FileIdentity(name, 1, 2, 3, written_s * S, written_s * S)


class Scene:
    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._ages, self._caplog = FileAges(), caplog

    def told(self, step: int, said_s: int, **written_s: int) -> list[str]:
        """Event and file of each warning when files written at these times are looked at, with a version file that has
        said `step` since `said_s`."""
        self._caplog.clear()
        files = [file(name, at) for name, at in written_s.items()]
        wanted = WantedVersion(str(step), Path("version.yaml"))
        self._ages.look(files, WeightVersion(1, step), wanted, said_s * S)
        return [" ".join(text.split(" ")[1:3]) for text in self._caplog.messages]


@pytest.fixture
def scene(caplog: pytest.LogCaptureFixture) -> Scene:
    return Scene(caplog)


def test_versions_that_are_written_in_order_are_told_nothing_of(scene: Scene) -> None:
    for step in (1, 2, 3):
        assert scene.told(step, 100 * step, a=100 * step - 2, b=100 * step - 1) == []
        assert scene.told(step, 100 * step, a=100 * step - 2, b=100 * step - 1) == []
    assert scene.told(4, 400, a=298, b=299) == []  # a new number for the same files


def test_a_file_that_is_newer_than_its_version_is_told_of_once(scene: Scene) -> None:
    for told in (["event=files_newer_than_version file=a"], []):
        assert scene.told(1, 100, a=150, b=99) == told


@pytest.mark.parametrize("is_seen_between", [False, True])
def test_a_rank_whose_file_stayed_while_the_others_were_written_is_told_of_once(
    scene: Scene, is_seen_between: bool
) -> None:
    """Also where an engine looked when the others were there and the version was not."""
    assert scene.told(1, 100, a=98, b=99) == []
    if is_seen_between:
        with pytest.raises(NoPublicationError, match="a was replaced"):
            scene.told(1, 100, a=198, b=99)
    for told in (["event=files_older_than_version file=b"], []):
        assert scene.told(2, 200, a=198, b=99) == told
    assert scene.told(2, 200, a=198, b=250) == ["event=files_newer_than_version file=b"]


def test_a_set_that_is_half_replaced_is_refused_until_the_rest_or_the_version_is(scene: Scene) -> None:
    """A trainer that writes no version, or none last, is not held up: all of its files are new."""
    assert scene.told(1, 100, a=98, b=99) == []
    for _ in range(2):
        with pytest.raises(NoPublicationError, match=r"a was replaced since version\.yaml was written, b was not"):
            scene.told(1, 100, a=198, b=99)
    assert scene.told(1, 100, a=198, b=199) == ["event=files_newer_than_version file=b"]
    assert scene.told(1, 100, a=298, b=299) == ["event=files_newer_than_version file=b"]
    assert scene.told(2, 300, a=298, b=299) == []
    with pytest.raises(NoPublicationError, match="b was replaced"):
        scene.told(2, 300, a=298, b=399)
    assert scene.told(3, 400, a=398, b=399) == []


def test_a_file_that_is_much_older_than_the_others_is_told_of_at_first_sight(scene: Scene) -> None:
    assert scene.told(1, 2000, a=1999, b=1000) == ["event=files_older_than_version file=b"]
    assert scene.told(1, 2000, a=1999, b=1500) == []
