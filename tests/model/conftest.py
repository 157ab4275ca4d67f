"""How long the model is played, and that threads of dead actors end by an exception which is nobody's failure.

.venv/bin/python -m pytest tests/model                                # as in the suite: the same few games each time
.venv/bin/python -m pytest tests/model --hypothesis-profile=long      # other games each time, and every single store
"""

import threading
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings

from fastdeploy_rl.update.newest_version import NewestVersion
from tests.model.actors import ActorDiedError

# A game takes a second: one that fails is not played a hundred times more to find a shorter one.
_GAMES = settings(deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.reuse, Phase.generate])
settings.register_profile("long", _GAMES, max_examples=200, stateful_step_count=25)


@pytest.fixture(autouse=True)
def nobody_looks_for_newer_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is no actor, and no part of what the ranks agree on."""
    monkeypatch.setattr(NewestVersion, "start", lambda self: None)


@pytest.fixture(autouse=True)
def the_dead_are_silent() -> Iterator[None]:
    reported = threading.excepthook

    def report(arguments: threading.ExceptHookArgs) -> None:
        if not issubclass(arguments.exc_type, ActorDiedError):
            reported(arguments)

    threading.excepthook = report
    yield
    threading.excepthook = reported
