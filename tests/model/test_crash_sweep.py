"""Whoever dies after whatever store of whatever command: what follows is one version, told truly, and goes on."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import settings

from tests.model.actors import Actor, wait_until
from tests.model.engine import ModelEngine
from tests.model.judge import judge, mend, story
from tests.model.people import Request, Trainer

_STRIDE = 4
"""The suite takes every fourth store; by hand, with the profile `long`, every single one."""


class Scene:
    """An engine, a trainer and one command at a time."""

    def __init__(self, engine: ModelEngine, trainer: Trainer) -> None:
        self.engine = engine
        self.trainer = trainer
        self.requests: list[Request] = []
        self._seed = 0

    def publish(self) -> str:
        self._seed += 1
        publishing = self.trainer.publish(self._seed)
        assert publishing.is_done, publishing
        return publishing.version

    def update(self, version: str = "") -> Request:
        request = Request(self.engine.port, "update", version).start()
        self.requests.append(request)
        return request

    def advance(self) -> str:
        """A good update, which must work."""
        version = self.publish()
        request = self.update(version)
        status = judge(self.engine, self.trainer, [request])
        assert request.told == "done", f"{request.error}: {story(self.engine)}"
        assert status.version == version, story(self.engine)
        return version

    def crash(self, kind: str, who: str, stores: int) -> bool:
        """One command in which `who` dies after so many stores; False where it came through before."""
        before = self.advance()
        version = self.publish() if kind == "update" else ""
        request = Request(self.engine.port, kind, version)
        actor = self._actor(who, request)
        actor.crash_after(stores)
        self.requests.append(request.start())
        wait_until(lambda: request.is_over, lambda: f"{request} does not end: {story(self.engine)}", 20)
        actor.spare()
        mend(self.engine)
        status = judge(self.engine, self.trainer, [request])
        self._judge(request, before, version, status.version)
        return actor.is_dead

    def _actor(self, who: str, request: Request) -> Actor:
        return request.actor if who == "client" else self.engine.ranks[int(who)].actor

    def _judge(self, request: Request, before: str, version: str, after: str) -> None:
        told = f"{request.told} {request.error}: {before} -> {version or 'cleared'}, now {after!r} {story(self.engine)}"
        if request.told == "died":
            assert after in (before, version), told
        elif request.told == "done":
            assert after == version, told
        else:
            assert after == before, told


@contextmanager
def a_scene(channel: Path, apply_mode: str) -> Iterator[Scene]:
    trainer = Trainer(channel)
    trainer.start()
    scene: Scene | None = None
    try:
        with ModelEngine(channel, apply_mode) as engine:
            scene = Scene(engine, trainer)
            yield scene
            for request in scene.requests:
                request.bury()
    finally:
        trainer.close()
        trainer.bury()


@pytest.mark.parametrize("kind", ["update", "clear"])
@pytest.mark.parametrize("who", ["0", "1", "2", "client"])
@pytest.mark.parametrize("apply_mode", ["alias", "copy"])
def test_death_after_any_store(tmp_path: Path, apply_mode: str, who: str, kind: str):
    stride = 1 if settings.get_current_profile_name() == "long" else _STRIDE
    with a_scene(tmp_path / "channel", apply_mode) as scene:
        stores = 1 % stride
        while scene.crash(kind, who, stores):
            stores += stride
        assert stores > 3
