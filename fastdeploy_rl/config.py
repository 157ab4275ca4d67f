"""Settings: where things live by default, how many threads copy, how long waits may take.

Owns every default and is the only reader of the environment. Knows nothing of what the settings are used for, and
creates nothing on disk: it answers paths, and whoever needs a directory makes it.
"""

import os
from collections.abc import Mapping, MutableMapping
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
parameters' own memory. `auto`: on each rank what is expected to stall decoding least, which is alias where nothing
speaks against it; the report says what was taken, and why (update/apply_choice.py)."""

KEEP, REFETCH, OFF = "keep", "refetch", "off"
ROLLBACKS = (KEEP, REFETCH, OFF)
"""How a rank comes back from a copy into live parameters. `keep`: the old bytes were saved before, which takes memory
of their size. `refetch`: they are read from the channel again. `off`: not at all; the engine is fenced. A rebind leaves
the old weights where they are, so that all three go back at no cost."""

REBUILD = "rebuild"
KV_POLICIES = (REBUILD, KEEP)
"""What an update does to the KV cache. `rebuild`: all of it is dropped, and requests in flight compute theirs anew with
the new weights. `keep`: requests in flight go on with what they have; no other request is given any of it."""

ABORT, WAIT = "abort", "wait"
IN_FLIGHT = (ABORT, WAIT, KEEP)
"""What a pause, a sleep or an update does to requests in flight. `abort`: they end, with what they have so far. `wait`:
they come to their end first. `keep`: they stop between two tokens, and go on afterwards."""

REFUSE = "refuse"
ON_TIMEOUT = (REFUSE, ABORT)
"""What follows when `wait` takes too long: the command is refused and nothing changed, or the rest is aborted."""

SLEEP_LEVELS = OFFLOAD_LEVEL, DROP_LEVEL = (1, 2)
"""1: weights stay in host memory. 2: they are dropped, and come back from the channel. KV cache and graphs hold nothing
that is worth keeping."""

RESTART, STOP = "restart", "stop"
ON_WORKER_DEATH = (RESTART, STOP)
"""What follows when a rank of a serving engine dies. `restart`: it is started again and comes back to the committed
version, while the others keep theirs. `stop`: the engine ends."""

API_KEY_VARIABLES = ("FASTDEPLOY_RL_API_KEY", "FD_API_KEY")
MAX_API_KEY_BYTES = 4096

MAX_DEADLINE_S = 86_400.0
"""A day: whoever means longer means no deadline."""


def checked_deadline(seconds: float, what: str = "deadline_s") -> float:
    """`seconds` if it is a sensible time to wait for something; ConfigurationError that names `what` otherwise."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds <= MAX_DEADLINE_S:
        raise ConfigurationError(
            f"{what} must be a number of seconds above 0 and at most {MAX_DEADLINE_S:.0f}, got {seconds!r:.40}"
        )
    return float(seconds)


def check_checksums(apply_mode: str, has_checksums: bool) -> None:
    """ConfigurationError where an update without checksums could not be undone."""
    if not has_checksums and apply_mode == COPY:
        raise ConfigurationError(
            "apply mode copy overwrites live weights, which takes checksums to undo; use auto or alias without them"
        )


@dataclass(frozen=True)
class Deadlines:
    """How long each kind of wait may take, in seconds; turned into absolute CLOCK_MONOTONIC times where a wait begins.
    Every wait of the package has one of these, or one that its caller names; where nothing is configured, the class's
    own values hold. Periods (how often one looks up) are no deadlines and stand where they are used."""

    attach_s: float = 600.0
    """From the start of a rank until all of them have loaded the model and met."""
    update_s: float = 30.0
    """An update for which nobody named a deadline."""
    clear_s: float = 30.0
    """A clear for which nobody named a deadline."""
    pause_s: float = 30.0
    """A pause, sleep or wake for which nobody named a deadline; with `wait`, for requests in flight to end."""
    quiet_s: float = 2.0
    """After the deadline of a command that let requests in flight end: until every rank has stopped between tokens."""
    recompute_s: float = 30.0
    """Reading live memory again for a receipt, for which nobody named a deadline."""
    stop_s: float = 10.0
    """From the word to stop until every rank has ended."""
    finish_s: float = 5.0
    """After a command's deadline nothing new begins; ranks that follow a decision may take this much longer."""
    rejoin_s: float = 600.0
    """From a rank's death until the one that replaces it is back among the others; it loads the model as at a start."""
    step_s: float = 300.0
    """One meeting of the ranks for a step of the model; a long prefill is no death."""
    read_s: float = 0.5
    """Until a record that another process writes reads consistently; a writer stalled longer is taken for silent."""
    outcome_s: float = 10.0
    """How much longer than its command's deadline a client of the board waits for the outcome: `finish_s`, and more."""
    http_s: float = 15.0
    """And a client over HTTP, whose answer still has to travel."""
    connect_s: float = 5.0
    """Until a TCP connection to an engine is there."""
    status_s: float = 10.0
    """A question over HTTP that the engine answers without asking its ranks."""
    answer_s: float = 600.0
    """A generated text, to its last token, for which nobody named a deadline."""
    body_s: float = 60.0
    """Until the whole body of an HTTP request is there."""
    legacy_s: float = 300.0
    """A command over FastDeploy's two routes: FastDeploy's own time-out."""
    let_go_s: float = 5.0
    """Until a thread that was told to give up has done so."""
    send_s: float = 10.0
    """Until the other end of a pair of sockets has room for a message."""
    last_words_s: float = 1.0
    """A dead worker's message may still lie in its socket."""
    terminate_s: float = 2.0
    """From SIGTERM to SIGKILL, and from there to giving up."""
    http_drain_s: float = 2.0
    """An ending HTTP server still finishes what it is sending."""
    resolve_s: float = 5.0
    """Until a publication that is just being replaced can be read."""
    publish_s: float = 30.0
    """A publication, or the release of one, for which nobody named a deadline."""
    snapshot_s: float = 3600.0
    """A snapshot that is being written, for which nobody named a deadline: a large model, and a disk for many."""
    give_up_s: float = 60.0
    """Until a snapshot's writer that was told to give up has done so: its disk still writes what it was given."""
    decide_s: float = 5.0
    """After a publication's deadline: until whoever is deciding about it has written the decision down."""
    lock_s: float = 0.2
    """Until a lock that is only looked at by somebody who clears up is free again."""
    greet_s: float = 5.0
    """From a connection that carries weights until both ends have proved who they are."""
    stall_s: float = 10.0
    """Until the other end of such a connection answers, or takes or gives some bytes."""
    reply_s: float = 300.0
    """One answer of a weight server, a gigabyte at most, until its client has taken it all."""
    idle_s: float = 60.0
    """Until a weight server lets go of a client that asks for nothing, and of the version that it held for it."""
    store_s: float = 5.0
    """One question to the store on which the ranks of several hosts meet; also who was first where two proposed."""
    probe_s: float = 60.0
    """A child process of the doctor that tries something out: a driver that starts, Paddle that is imported."""
    history_lock_s: float = 1.0
    """Until the history file's lock is free: it is held for one line, so whoever holds it longer stands still."""

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


def selected_gpu(environ: Mapping[str, str] = os.environ) -> int | None:
    """Which of the visible devices is this process's, as Paddle's launcher says it: `$FLAGS_selected_gpus`. None where
    it is not set, or lists several."""
    text = environ.get("FLAGS_selected_gpus", "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 4 else None


def has_v1_updates(environ: Mapping[str, str] = os.environ) -> bool:
    """FastDeploy was started for control by its V1 routes, in the place of the status word."""
    return bool(fastdeploy_switches("FD_ENABLE_V1_UPDATE_WEIGHTS", environ=environ))


def fastdeploy_switches(*names: str, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Those of FastDeploy's switches `names` that are on."""
    return tuple(name for name in names if environ.get(name, "0") not in ("", "0"))


def api_keys(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The keys of `$FASTDEPLOY_RL_API_KEY`, else of `$FD_API_KEY` (FastDeploy's), separated by commas; none where
    neither is set. An engine takes any of them, a client sends the first. ConfigurationError for what can be none."""
    for variable in API_KEY_VARIABLES:
        texts = environ.get(variable, "").split(",")
        if keys := tuple(checked_api_key(text.strip(), variable) for text in texts if text.strip()):
            return keys
    return ()


def checked_api_key(key: str, what: str) -> str:
    """`key` if every HTTP client can send it: visible ASCII, MAX_API_KEY_BYTES at most. ConfigurationError that names
    `what` and tells nothing of the key."""
    if not 0 < len(key) <= MAX_API_KEY_BYTES or not all("!" <= letter <= "~" for letter in key):
        raise ConfigurationError(f"{what} must be 1 to {MAX_API_KEY_BYTES} visible ASCII characters, without blanks")
    return key


def mooncake_forces_tcp(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether Mooncake's library would take TCP whatever it is asked for: `$MC_FORCE_TCP`, with any value."""
    return "MC_FORCE_TCP" in environ


def changed_environ(
    changes: Mapping[str, str | None], environ: MutableMapping[str, str] = os.environ
) -> dict[str, str | None]:
    """Sets variables of this process (None: unsets them) for a library that takes its settings from there. What they
    were before, so that giving it back here undoes the change."""
    former = {name: environ.get(name) for name in changes}
    for name, value in changes.items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value
    return former


def child_environ(changes: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a process that we start: ours, with `changes`, and without keys, which it has no use for."""
    return {name: value for name, value in environ.items() if name not in API_KEY_VARIABLES} | dict(changes)
