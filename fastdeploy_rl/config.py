"""Settings: where things live by default, how many threads copy, how long waits may take.

Owns every default and is the only reader of the environment. Knows nothing of what the settings are used for, and
creates nothing on disk: it answers paths, and whoever needs a directory makes it.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fastdeploy_rl.errors import ConfigurationError

MAX_COPY_THREADS = 64
DEFAULT_COPY_THREADS = 8
"""More threads than this do not make one memory copy faster on
the machines we measured; fewer where there are fewer CPUs."""

ALIAS, ALIAS_STRICT, COPY, AUTO = "alias", "alias-strict", "copy", "auto"
APPLY_MODES = (AUTO, ALIAS, ALIAS_STRICT, COPY)
"""How weights become live. `alias`: parameters rebind to published memory; those that cannot are copied, and reported
with the reason. `alias-strict`: as alias, but an update that would copy is refused. `copy`: published bytes go into the
parameters' own memory. `auto`: alias, or copy from a source whose memory does not stay as it is."""

KEEP, REFETCH, OFF = "keep", "refetch", "off"
ROLLBACKS = (KEEP, REFETCH, OFF)
"""How a rank comes back from a copy into live parameters. `keep`: the old bytes were saved before, which takes memory
of their size. `refetch`: they are read from the channel again. `off`: not at all; the engine is fenced. A rebind leaves
the old weights where they are, so that all three go back at no cost."""

FINISH_GRACE_S = 5.0
"""After a command's deadline nothing new begins; ranks that follow a decision may take this much longer."""
BOARD_GRACE_S = FINISH_GRACE_S + 5.0
"""How much longer than its deadline a client of the board waits for the outcome."""
HTTP_GRACE_S = BOARD_GRACE_S + 5.0
"""And a client over HTTP, whose answer still has to travel."""

MAX_DEADLINE_S = 86_400.0
"""A day: whoever means longer means no deadline."""


def checked_deadline(seconds: float, what: str = "deadline_s") -> float:
    """`seconds` if it is a sensible time to wait for something; ConfigurationError that names `what` otherwise."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds <= MAX_DEADLINE_S:
        raise ConfigurationError(
            f"{what} must be a number of seconds above 0 and at most {MAX_DEADLINE_S:.0f}, got {seconds!r:.40}"
        )
    return float(seconds)


@dataclass(frozen=True)
class Deadlines:
    """How long each kind of wait may take, in seconds; turned
    into absolute CLOCK_MONOTONIC times where a wait begins."""

    attach_s: float = 600.0
    """From the start of a rank until all of them have loaded the model and met."""
    update_s: float = 30.0
    """An update for which nobody named a deadline."""
    clear_s: float = 30.0
    """A clear for which nobody named a deadline."""
    stop_s: float = 10.0
    """From the word to stop until every rank has ended."""
    finish_s: float = FINISH_GRACE_S
    """After a command's deadline nothing new begins; ranks that follow a decision may take this much longer."""
    rejoin_s: float = 120.0
    """From a rank's death until the rank that replaces it is back among the others."""
    step_s: float = 300.0
    """One meeting of the ranks for a step of the model; a long prefill is no death."""
    read_s: float = 2.0
    """Until a record that another process writes reads consistently; a writer stalled longer is taken for silent."""

    def __post_init__(self) -> None:
        for name, seconds in vars(self).items():
            checked_deadline(seconds, name)


def runtime_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """This user's directory for sockets, locks and the default channel: `$XDG_RUNTIME_DIR/fastdeploy_rl`, or
    `/dev/shm/fastdeploy_rl-$UID` where no such directory is given (containers). May not exist yet."""
    base = environ.get("XDG_RUNTIME_DIR", "")
    if base and Path(base).is_dir():
        return Path(base) / "fastdeploy_rl"
    return Path(f"/dev/shm/fastdeploy_rl-{os.getuid()}")


def default_channel(environ: Mapping[str, str] = os.environ) -> Path:
    """The channel that trainer and engine meet on when neither names one."""
    return runtime_dir(environ)


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Where converted models are kept between runs: `$XDG_CACHE_HOME/fastdeploy_rl` or `~/.cache/fastdeploy_rl`."""
    base = environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "fastdeploy_rl"


def num_copy_threads(environ: Mapping[str, str] = os.environ) -> int:
    """Threads of one native copy: `$FASTDEPLOY_RL_COPY_THREADS`, else the CPUs this process may use, 8 at most."""
    text = environ.get("FASTDEPLOY_RL_COPY_THREADS", "")
    if not text:
        return min(DEFAULT_COPY_THREADS, len(os.sched_getaffinity(0)))
    if not text.isascii() or not text.isdigit() or len(text) > 4 or not 1 <= int(text) <= MAX_COPY_THREADS:
        raise ConfigurationError(f"FASTDEPLOY_RL_COPY_THREADS must be 1 to {MAX_COPY_THREADS}, got {text[:40]!r}")
    return int(text)


def libcuda_path(environ: Mapping[str, str] = os.environ) -> str:
    """The CUDA driver to load: `$FASTDEPLOY_RL_LIBCUDA`, else the one that the system finds."""
    return environ.get("FASTDEPLOY_RL_LIBCUDA", "") or "libcuda.so.1"


def cuda_visible_devices(environ: Mapping[str, str] = os.environ) -> str | None:
    """`$CUDA_VISIBLE_DEVICES` as the driver reads it; None where it is not set (empty hides every device)."""
    return environ.get("CUDA_VISIBLE_DEVICES")


def child_environ(changes: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a process that we start: ours, with `changes`."""
    return dict(environ) | dict(changes)
