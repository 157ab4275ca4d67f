"""The channel and the engines, looked at from outside. Changes nothing: not even slots of the dead are swept.

Owns the questions; the answers come from the classes that trainer and engine use themselves.
"""

from pathlib import Path

from fastdeploy_rl.board.board import Board, board_name
from fastdeploy_rl.control.http_address import HttpAccess, find_http_access, find_http_address
from fastdeploy_rl.errors import ConfigurationError, EngineNotFoundError, FastDeployRLError, ManifestError
from fastdeploy_rl.manifest import Manifest
from fastdeploy_rl.memory.owner_lock import Owner, is_alive, owner_of
from fastdeploy_rl.memory.private_directory import check_private_directory
from fastdeploy_rl.memory.shared_segment import SHM_DIR
from fastdeploy_rl.observe.doctor.check import Check, Status, fail, ok, warn
from fastdeploy_rl.observe.doctor.leftovers import (
    EngineAtPort,
    Item,
    Remains,
    find_remains,
    find_unclaimed,
    killed_publishers,
    known_ports,
    leasing_locks,
    publisher_numbers,
    segments_in_tables,
    users_of,
)
from fastdeploy_rl.observe.sizes import size_text
from fastdeploy_rl.publish.channel import Channel, Latest
from fastdeploy_rl.report import LOST_PHASE

_LISTED = 6
"""Names in one line."""


# --- the channel -----------------------------------------------------------------------------------------------------


def check_channel(channel: Channel) -> list[Check]:
    """Directory, publication, publisher, holders and arenas of one channel."""
    place = judge_directory(channel)
    if place.status is not Status.OK or not channel.holders_dir.is_dir():
        return [place]
    return [
        place,
        _check_publication(channel),
        _check_publisher(channel),
        _check_holders(channel),
        _check_arenas(channel),
    ]


def judge_directory(channel: Channel) -> Check:
    for path in (channel.path, channel.holders_dir):
        try:
            check_private_directory(path)
        except FileNotFoundError:
            return ok("directory", f"nothing was published at {channel.path} yet")
        except ConfigurationError as error:
            mend = f"chmod 700 {path}, if it is yours alone; else name another directory (--ipc-dir)"
            return fail("directory", str(error), mend)
    return ok("directory", f"{channel.path}, yours alone")


def _check_publication(channel: Channel) -> Check:
    try:
        latest = channel.read_latest()
        manifest = channel.read_manifest(latest) if latest else None
    except FileNotFoundError:
        return fail("publication", "LATEST names a manifest that is not there", "publish again")
    except ManifestError as error:
        return fail("publication", str(error), f"fastdeploy-rl retire --ipc-dir {channel.path}; publish again")
    if latest is None or manifest is None:
        return ok("publication", f"none now; epoch {channel.read_epoch()}")
    return judge_publication(latest, manifest, f"epoch {channel.read_epoch()}")


def judge_publication(latest: Latest, manifest: Manifest, epoch: str) -> Check:
    gone = [segment.locator for segment in manifest.segments if not Path(SHM_DIR, segment.locator).exists()]
    if gone:
        return fail("publication", f"version {latest.version}: its memory {gone[0]} is gone", "publish again")
    size = size_text(sum(tensor.num_bytes for tensor in manifest.tensors))
    found = f"version {latest.version}: {len(manifest.tensors)} tensors, {size}, layout {manifest.layout}; {epoch}"
    return ok("publication", found)


def _check_publisher(channel: Channel) -> Check:
    locks = [channel.lock_of(number) for number in publisher_numbers(channel)]
    alive = ", ".join(owner_text(owner_of(lock)) for lock in locks if is_alive(lock))
    if killed := killed_publishers(channel):
        dead = ", ".join(str(owner_of(lock) or "pid unknown") for lock in killed)
        found = f"was killed ({dead}){f'; others live: {alive}' if alive else ''}; what was published last stands"
        mend = "start the trainer again: it takes over what is there; or fastdeploy-rl doctor --clean"
        return warn("publisher", found, mend)
    return ok("publisher", f"alive, {alive}" if alive else "none now")


def _check_holders(channel: Channel) -> Check:
    live = [path for path in sorted(channel.holders_dir.glob("*.lock")) if is_alive(path)]
    owners = ", ".join(owner_text(owner_of(path)) for path in live)
    return ok("holders", f"{len(live)} alive{': ' + owners if owners else ''}")


def _check_arenas(channel: Channel) -> Check:
    names = segments_in_tables(channel)
    leases = sum(is_alive(lock) for lock in leasing_locks(channel))
    num_bytes = sum(path.stat().st_size for name in names if (path := Path(SHM_DIR, name)).exists())
    return ok("arenas", f"{len(names)}, {size_text(num_bytes)} together; {leases} leases of live holders")


def owner_text(owner: Owner | None) -> str:
    """With a word where the process cannot be seen: CUDA memory could not be shared with it."""
    if owner is None:
        return "pid unknown"
    seen = "" if Path(f"/proc/{owner.pid}").exists() else " (of another PID namespace)"
    return f"{owner}{seen}"


# --- engines ---------------------------------------------------------------------------------------------------------


def check_engines(wanted: int | None) -> list[Check]:
    """Every engine of this user on this machine, or the one at port `wanted`."""
    ports = known_ports() if wanted is None else [wanted]
    checks = [check for port in ports if (check := _check_engine(port, must_live=wanted is not None))]
    if wanted is not None and not checks:
        start = f"fastdeploy-rl serve --engine-worker-queue-port {wanted} ..., or name the port it runs on"
        return [fail(f"port {wanted}", "no engine", start)]
    return checks or [ok("engines", "none")]


def _check_engine(port: int, *, must_live: bool) -> Check | None:
    """None where nothing but an old lock file lies at the port."""
    name, engine = f"port {port}", EngineAtPort(port)
    if not engine.is_alive:
        if not Path(SHM_DIR, board_name(port)).exists():
            return None
        if not engine.has_lock:
            return warn(
                name,
                f"a board whose lock cannot be seen from here, {engine.who}",
                "if it is another container's: share its runtime directory too, or choose another port here",
            )
        if must_live:
            start = f"fastdeploy-rl serve --engine-worker-queue-port {port} ...: it reclaims what this one left"
            return fail(name, f"dead: {engine.who}", start)
        return warn(
            name, f"dead: {engine.who}", "fastdeploy-rl doctor --clean; the next engine at this port reclaims it too"
        )
    who = owner_text(next((owner for lock in engine.locks if (owner := owner_of(lock))), None))
    try:
        board = Board.attach(port)
    except EngineNotFoundError as error:
        return warn(
            name,
            f"alive, {who}, without a board: {error}",
            "wait, if it is just starting; else end it and start it again",
        )
    try:
        return _judge_status(name, who, board)
    finally:
        board.close()


def _judge_status(name: str, who: str, board: Board) -> Check:
    try:
        status = board.status()
    except FastDeployRLError as error:
        return fail(name, f"alive, {who}, but its board cannot be read: {error}", "end it and start it again")
    found = f"alive, {who}, {len(status.ranks)} ranks, {status.admission}, version {status.version or 'none'}"
    found += _http_text(board.port)
    if status.admission == "fenced":
        update = f"fastdeploy-rl update --engine {board.port}"
        is_coming_back = any(rank.phase == LOST_PHASE for rank in status.ranks)
        mend = f"wait some seconds: it is started again; if it stays fenced, {update}" if is_coming_back else update
        return fail(name, f"{found}: {status.reason}", mend)
    if find_http_access(board.port) is HttpAccess.OPEN:
        return warn(
            name,
            f"{found}, open to all who reach this machine",
            "start it with FASTDEPLOY_RL_API_KEY or --api-key-file, or without --host",
        )
    return ok(name, found)


def _http_text(port: int) -> str:
    try:
        return f", {find_http_address(port)}"
    except EngineNotFoundError:
        return ""  # it listens for none, as the numpy engine


# --- leftovers -------------------------------------------------------------------------------------------------------


def check_leftovers(channel: Channel) -> list[Check]:
    """What `--clean` would take away, and what it would leave to its user."""
    checks = [_judge_remains(dead) for dead in find_remains(channel)]
    unclaimed = find_unclaimed(channel)
    checks += judge_unclaimed(unclaimed, users_of(item.path for item in unclaimed) if unclaimed else {})
    return checks or [ok("leftovers", "none")]


def _judge_remains(dead: Remains) -> Check:
    found = f"{dead.who}: {items_text(dead.items())}"
    if user := dead.in_use_by:
        return ok("in use", f"{found}; still leased by {user}")
    return warn("of the dead", found, "fastdeploy-rl doctor --clean")


def judge_unclaimed(items: list[Item], users: dict[Path, list[int]]) -> list[Check]:
    """`users`: pids that have each of them mapped."""
    used, unused = ([item for item in items if bool(users[item.path]) is is_used] for is_used in (True, False))
    checks = []
    if used:
        pids = sorted({pid for item in used for pid in users[item.path]})
        checks.append(ok("of others", f"{items_text(used)}; used by pid {', '.join(map(str, pids[:8]))}"))
    if unused:
        patterns = list(dict.fromkeys(_pattern(item.path) for item in unused))
        listed = " ".join(patterns[:_LISTED]) + (" ..." if len(patterns) > _LISTED else "")
        mend = f"name their channel: fastdeploy-rl doctor --clean --ipc-dir DIR; if it is gone: rm {listed}"
        checks.append(warn("of nobody known", f"{items_text(unused)}: no lock tells whose", mend))
    return checks


def _pattern(path: Path) -> str:
    """All segments of the channel that this one belongs to."""
    prefix, user, key, *rest = [*path.name.split("."), "", ""]
    return f"{path.parent}/{prefix}.{user}.{key}.*" if prefix == "fastdeploy_rl" and len(rest) > 2 else str(path)


def items_text(items: list[Item]) -> str:
    names = ", ".join(item.path.name for item in items[:_LISTED]) + (", ..." if len(items) > _LISTED else "")
    return f"{names} ({len(items)} in all, {size_text(sum(item.num_bytes for item in items))})"
