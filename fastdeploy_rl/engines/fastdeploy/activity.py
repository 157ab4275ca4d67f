"""That the plugin is active, and what it did: lines in a log of its own, and metrics beside FastDeploy's.

Owns the names of both. Refuses to know why. Invariant: nothing here fails a worker that works: where there is nowhere
to show a metric the lines are left.
"""

import logging
from functools import cache
from typing import Any

_log = logging.getLogger(__name__)

LOG_FILE = "fastdeploy_rl.log"
"""In FastDeploy's log directory (FD_LOG_DIR)."""


def open_log() -> None:
    """What this package logs goes to LOG_FILE as well. FastDeploy's logs are set up by then."""
    from fastdeploy.utils import get_logger

    ours, theirs = logging.getLogger("fastdeploy_rl"), get_logger("fastdeploy_rl", LOG_FILE)
    if theirs is not ours:
        for handler in theirs.handlers:
            if handler not in ours.handlers:
                ours.addHandler(handler)
    ours.setLevel(logging.INFO)


def tell_active(rank: int, port: int, load_strategy: str, version: str) -> None:
    """This rank's runner keeps its weights by this package."""
    _log.warning(
        "event=active runner=fastdeploy_rl rank=%d port=%d load_strategy=%s version=%s",
        rank,
        port,
        load_strategy,
        version,
    )
    if metrics := _metrics():
        metrics["active"].labels(rank=str(rank), load_strategy=load_strategy).set(1)


def tell_command(rank: int, command: str, outcome: str) -> None:
    """A call of FastDeploy's ended; `outcome`: done or refused."""
    if metrics := _metrics():
        metrics["commands"].labels(rank=str(rank), command=command, outcome=outcome).inc()


@cache
def _metrics() -> dict[str, Any]:
    """One set in a process: their registry is the process's. Empty without prometheus_client."""
    try:
        from prometheus_client import Counter, Gauge
    except ImportError:
        return {}
    return {
        "active": Gauge(
            "fastdeploy_rl_runner_active",
            "1 where a rank's weights are kept by fastdeploy_rl's runner",
            ["rank", "load_strategy"],
            multiprocess_mode="liveall",
        ),
        "commands": Counter(
            "fastdeploy_rl_commands",
            "Calls of FastDeploy's for weights, by how they ended",
            ["rank", "command", "outcome"],
        ),
    }
