"""Acts that may fail on one rank without ending it: what went wrong goes to the others as text.

Owns the turning of an exception into words. Invariant: nothing of the exception stays, since its frames would keep
views of published memory alive."""

import logging
from collections.abc import Callable
from typing import NamedTuple

from fastdeploy_rl.errors import FastDeployRLError, StepFailedError, wire_text
from fastdeploy_rl.update.transaction import as_step_failure

_log = logging.getLogger(__name__)


class Failure(NamedTuple):
    """An error as the board tells it: the name of its class, and its text."""

    name: str
    text: str


def attempt(act: Callable[[], None], rank: int) -> Failure | None:
    """What went wrong; None when all went well."""
    try:
        with as_step_failure("command", rank):
            act()
    except FastDeployRLError as error:
        is_unexpected = isinstance(error, StepFailedError)
        failure = Failure(type(error).__name__, wire_text(error))
        _log.warning("rank=%d error=%s reason=%r", rank, *failure, exc_info=is_unexpected)
        return failure
    return None
