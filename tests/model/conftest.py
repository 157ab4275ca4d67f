"""How long the model is played, and that threads of dead actors end by an exception which is nobody's failure.

    .venv/bin/python -m pytest tests/model                                # as in the suite: the same few games each time
    .venv/bin/python -m pytest tests/model --hypothesis-profile=long      # other games each time, and every single store
"""

import threading
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.model.actors import ActorDiedError

_GAMES = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
settings.register_profile("long", _GAMES, max_examples=200, stateful_step_count=25)


@pytest.fixture(autouse=True)
def the_dead_are_silent() -> Iterator[None]:
    reported = threading.excepthook

    def report(arguments: threading.ExceptHookArgs) -> None:
        if not issubclass(arguments.exc_type, ActorDiedError):
            reported(arguments)

    threading.excepthook = report
    yield
    threading.excepthook = reported
