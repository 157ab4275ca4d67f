"""What is done to an engine in a soak, round by round: updates, refusals, clears, and several who ask at once.

Each round leaves the engine on a complete version, or cleared, and says which versions may be live then. Whoever races
may win or lose; a refusal must come as the error it is. Refuses to know how anything is measured."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from soak_scene import WAIT_S, Scene, SoakError
from soak_trainer import Flaw

from fastdeploy_rl.board.legacy import LegacySignal
from fastdeploy_rl.config import ALIAS_STRICT
from fastdeploy_rl.errors import (
    ChecksumMismatchError,
    CoverageError,
    DeadlineExceededError,
    FastDeployRLError,
    NoPublicationError,
    NotAliasableError,
    UpdateRejectedError,
    VersionRegressError,
)
from fastdeploy_rl.lifecycle import LegacyStatus
from fastdeploy_rl.sources.registry import RSYNC
from fastdeploy_rl.update.client import BoardClient

Errors = tuple[type[FastDeployRLError], ...]


def take_the_newest(scene: Scene) -> Sequence[str]:
    version = scene.publish()
    scene.client.update(deadline_s=WAIT_S)
    return [version]


def take_it_again_by_force(scene: Scene) -> Sequence[str]:
    version = scene.publish()
    for _ in range(2):
        scene.client.update(force=True, deadline_s=WAIT_S)
    return [version]


def refuse_a_missing_tensor(scene: Scene) -> Sequence[str]:
    return _refuse(scene, "missing tensor", CoverageError)


def refuse_a_wrong_shape(scene: Scene) -> Sequence[str]:
    return _refuse(scene, "wrong shape", CoverageError)


def refuse_a_corrupted_byte(scene: Scene) -> Sequence[str]:
    return _refuse(scene, "corrupted byte", ChecksumMismatchError)


def _refuse(scene: Scene, flaw: Flaw, error: type[FastDeployRLError]) -> Sequence[str]:
    before = scene.live()
    scene.publish(flaw)
    _expect((error,), lambda: scene.client.update(deadline_s=WAIT_S))
    return [before]


def refuse_what_cannot_be_aliased(scene: Scene) -> Sequence[str]:
    """Other modes copy it, and slices that are fetched are put together on the way."""
    before = scene.live()
    version = scene.publish(layout="full")
    if scene.mode == ALIAS_STRICT and scene.num_ranks > 1 and scene.strategy != RSYNC:
        _expect((NotAliasableError,), lambda: scene.client.update(deadline_s=WAIT_S))
        return [before]
    scene.client.update(deadline_s=WAIT_S)
    return [version]


def refuse_to_go_back(scene: Scene) -> Sequence[str]:
    """Without force; the version before is still to be had, or not any more."""
    former = scene.publish()
    version = scene.publish()
    scene.client.update(deadline_s=WAIT_S)
    _expect((VersionRegressError, NoPublicationError), lambda: scene.client.update(former, deadline_s=WAIT_S))
    return [version]


def go_back_by_force(scene: Scene) -> Sequence[str]:
    """Nothing was published over the memory of the version before, so that it is there."""
    former = scene.publish()
    scene.publish()
    scene.client.update(deadline_s=WAIT_S)
    scene.client.update(former, force=True, deadline_s=WAIT_S)
    return [former]


def cut_an_update_short(scene: Scene) -> Sequence[str]:
    """Anything from hopeless to just in time."""
    before = scene.live()
    version = scene.publish()
    deadline_s = 10 ** scene.random.uniform(-4, -1.5)
    return [version] if _try((DeadlineExceededError,), lambda: scene.client.update(deadline_s=deadline_s)) else [before]


def clear(scene: Scene) -> Sequence[str]:
    scene.client.clear(deadline_s=WAIT_S)
    return [""]


def refuse_while_cleared(scene: Scene) -> Sequence[str]:
    clear(scene)
    return _refuse(scene, "wrong shape", CoverageError)


def write_the_word(scene: Scene) -> Sequence[str]:
    """As a trainer does that has nothing of ours: a plain store, then it looks until the word reads 0."""
    version = scene.publish()
    word = np.memmap(f"/dev/shm/model_weights_status.{scene.engine.port}", np.int32, "r+", shape=(1,))
    word[0] = LegacyStatus.UPDATING
    until = time.monotonic() + WAIT_S
    while word[0] != LegacyStatus.NORMAL:
        if time.monotonic() > until:
            raise SoakError(f"the word reads {word[0]} after {WAIT_S:.0f} s")
        time.sleep(0.001)  # as it polls; bounded by the deadline above
    return [version]


def write_the_word_for_a_flawed_one(scene: Scene) -> Sequence[str]:
    """The word cannot say why; only that the engine is where it was."""
    before = scene.live()
    scene.publish("missing tensor")
    with LegacySignal(scene.engine.port) as signal:
        _try((UpdateRejectedError,), lambda: signal.request_update(WAIT_S))
    return [before]


def clear_by_the_word(scene: Scene) -> Sequence[str]:
    with LegacySignal(scene.engine.port) as signal:
        signal.request_clear(WAIT_S)
    return [""]


def two_controllers_update(scene: Scene) -> Sequence[str]:
    version = scene.publish()
    _race(lambda: _update(scene, force=False), lambda: _update(scene, force=True))
    return [version]


def two_controllers_disagree(scene: Scene) -> Sequence[str]:
    version = scene.publish()
    _race(lambda: _update(scene, force=False), lambda: _clear(scene))
    return [version, ""]


def word_against_controller(scene: Scene) -> Sequence[str]:
    version = scene.publish()
    _race(lambda: _update(scene, force=True), lambda: _write(scene))
    return [version]


def word_against_clear(scene: Scene) -> Sequence[str]:
    version = scene.publish()
    _race(lambda: _clear(scene), lambda: _try((UpdateRejectedError,), lambda: _write(scene)))
    return [version, ""]


def publish_meanwhile(scene: Scene) -> Sequence[str]:
    """Whoever asked for the newest gets that of the moment."""
    versions = [scene.publish()]
    _race(lambda: _update(scene, force=False), lambda: versions.append(scene.publish()))
    return versions


ROUNDS: tuple[Callable[[Scene], Sequence[str]], ...] = (
    take_the_newest,
    refuse_a_missing_tensor,
    refuse_a_wrong_shape,
    take_it_again_by_force,
    refuse_a_corrupted_byte,
    two_controllers_update,
    refuse_what_cannot_be_aliased,
    refuse_to_go_back,
    go_back_by_force,
    clear,
    cut_an_update_short,
    write_the_word,
    write_the_word_for_a_flawed_one,
    word_against_controller,
    two_controllers_disagree,
    take_the_newest,
    refuse_while_cleared,
    publish_meanwhile,
    word_against_clear,
    take_the_newest,
    clear_by_the_word,
)


def play(round_: Callable[[Scene], Sequence[str]], scene: Scene) -> None:
    """One round, and what must hold after it. SoakError names the round."""
    try:
        scene.check(round_(scene))
    except (SoakError, FastDeployRLError) as error:
        name = round_.__name__.replace("_", " ")
        raise SoakError(f"{scene.strategy} {scene.mode}, round {name!r}: {type(error).__name__}: {error}") from error


# --- how several ask at once -----------------------------------------------------------------------


def _race(*racers: Callable[[], object]) -> None:
    """All at once; the first error of one of them is raised when all are back."""
    with ThreadPoolExecutor(len(racers)) as pool:
        futures = [pool.submit(racer) for racer in racers]
    for future in futures:
        future.result()


def _update(scene: Scene, *, force: bool) -> None:
    with BoardClient(scene.engine.port) as client:
        client.update(force=force, deadline_s=WAIT_S)


def _clear(scene: Scene) -> None:
    with BoardClient(scene.engine.port) as client:
        client.clear(deadline_s=WAIT_S)


def _write(scene: Scene) -> None:
    with LegacySignal(scene.engine.port) as signal:
        signal.request_update(WAIT_S)


def _expect(errors: Errors, act: Callable[[], object]) -> None:
    if _try(errors, act):
        raise SoakError(f"done, where {' or '.join(error.__name__ for error in errors)} had to come")


def _try(errors: Errors, act: Callable[[], object]) -> bool:
    """Whether it was done; False for one of `errors`."""
    try:
        act()
    except errors:
        return False
    return True
