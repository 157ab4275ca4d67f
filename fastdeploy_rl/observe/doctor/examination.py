"""The whole examination, as a list of sections: what the verb `doctor` prints, and a program may read.

Owns the order and what happens when a section cannot be looked at: that is a finding too, and the others go on.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from fastdeploy_rl.config import default_channel
from fastdeploy_rl.errors import FastDeployRLError
from fastdeploy_rl.observe.doctor import machine
from fastdeploy_rl.observe.doctor.check import Check, Section, Status, fail, ok, worst
from fastdeploy_rl.observe.doctor.kernel import Kernel
from fastdeploy_rl.observe.sizes import size_text


class Removed(msgspec.Struct, frozen=True):
    """A name that `clean` took away."""

    path: str
    num_bytes: int


class IpcQuestion(msgspec.Struct, frozen=True):
    """Can this process share memory with the other side? `peers`: its processes; none: those that are found."""

    peers: tuple[int, ...] = ()


class FastDeployQuestion(msgspec.Struct, frozen=True):
    """Is the plugin there, and active? At one port, or at all where `port` is None."""

    port: int | None = None


class Examination(msgspec.Struct, frozen=True):
    """What was found, after what was `removed` went."""

    status: Status
    sections: list[Section]
    removed: list[Removed]


def examine(
    channel: Path | None = None,
    *,
    engine: int | None = None,
    clean: bool = False,
    ipc: IpcQuestion | None = None,
    fastdeploy: FastDeployQuestion | None = None,
    kernel: Kernel | None = None,
) -> Examination:
    """Looks at this machine, one channel (None: the default one) and the engines (or the one at port `engine`). Reads
    only, unless `clean`: then first removes what the dead left. Imports neither Paddle nor torch; blocks for nobody.

    `ipc` and `fastdeploy` ask for more, and try it out in child processes: these make CUDA contexts and import Paddle,
    and have Deadlines.probe_s each."""
    kernel = kernel or Kernel()
    place = channel or default_channel()
    native = _check_native()
    removed: list[Removed] = []
    sections = []
    if clean and native.status is Status.OK:
        sections.append(_section("cleaning", lambda: _clean(place, removed)))
    sections += [
        _section("shared memory", lambda: machine.check_shared_memory(kernel)),
        _section("limits", lambda: machine.check_limits(kernel)),
        _section("namespaces", lambda: machine.check_namespaces(kernel)),
        _section("packages", lambda: [*machine.check_packages(), native]),
    ]
    if native.status is Status.OK:
        sections += _sections_of_processes(place, engine, kernel)
        sections += _sections_of_ipc(place, ipc, kernel) if ipc is not None else []
        sections += _sections_of_fastdeploy(fastdeploy, kernel) if fastdeploy is not None else []
    return Examination(worst(sections), sections, removed)


def _sections_of_processes(place: Path, engine: int | None, kernel: Kernel) -> list[Section]:
    """Those that need the native core."""
    from fastdeploy_rl.observe.doctor import channel as channels
    from fastdeploy_rl.observe.doctor import gpu
    from fastdeploy_rl.publish.channel import Channel

    channel = Channel(place)
    return [
        _section("gpu", lambda: gpu.check_gpus(kernel)),
        _section("channel", lambda: channels.check_channel(channel)),
        _section("engines", lambda: channels.check_engines(engine)),
        _section("leftovers", lambda: channels.check_leftovers(channel)),
    ]


def _sections_of_ipc(place: Path, question: IpcQuestion, kernel: Kernel) -> list[Section]:
    """One for this side, and one for each process of the other."""
    from fastdeploy_rl.observe.doctor import ipc
    from fastdeploy_rl.observe.doctor.peers import Peer, find_peers
    from fastdeploy_rl.publish.channel import Channel

    peers: list[Peer] = []

    def look_here() -> list[Check]:
        peers.extend(find_peers(Channel(place), question.peers))
        return ipc.check_this_side(kernel, peers, ipc.find_signs(kernel, peers))

    here = _section("ipc", look_here)
    meant = ipc.find_signs(kernel, peers)
    looks = [(f"ipc with {peer.who}", partial(ipc.check_peer, kernel, peer, meant)) for peer in peers]
    return [here, *(_section(title, look) for title, look in looks)]


def _sections_of_fastdeploy(question: FastDeployQuestion, kernel: Kernel) -> list[Section]:
    """One for what is installed, and one for each port."""
    from fastdeploy_rl.observe.doctor import fastdeploy, plugin_probe

    processes = fastdeploy.find_processes(kernel)
    entries = plugin_probe.entries()
    ports = fastdeploy.known_engines(processes) if question.port is None else [question.port]

    def look_here() -> list[Check]:
        is_running = any(process.is_worker for process in processes)
        answer = plugin_probe.try_plugin()
        checks = fastdeploy.check_plugin(entries, answer, kernel.environ(), is_running=is_running)
        return checks if ports else [*checks, ok("engines", "no FastDeploy, and no word of one, on this machine")]

    check_port = partial(fastdeploy.check_port, must_live=question.port is not None)
    looks = [(f"fastdeploy at port {port}", partial(check_port, port, processes, entries)) for port in ports]
    return [_section("fastdeploy", look_here), *(_section(title, look) for title, look in looks)]


def _clean(place: Path, removed: list[Removed]) -> list[Check]:
    from fastdeploy_rl.observe.doctor.leftovers import find_remains, remove_unused
    from fastdeploy_rl.publish.channel import Channel

    for dead in find_remains(Channel(place)):
        removed += [Removed(str(item.path), item.num_bytes) for item in remove_unused(dead)]
    return [ok("removed", f"{len(removed)} names, {size_text(sum(name.num_bytes for name in removed))}")]


def _section(title: str, look: Callable[[], list[Check]]) -> Section:
    try:
        return Section(title, look())
    except (FastDeployRLError, OSError) as error:
        mend = "mend what the message says, then look again"
        return Section(title, [fail(title, f"cannot be looked at: {error}", mend)])


def _check_native() -> Check:
    try:
        from fastdeploy_rl import _native
    except ImportError as error:
        return fail("native core", f"does not load: {error}", "pip install --force-reinstall fastdeploy_rl")
    return ok("native core", f"kernels for {_native.CPU_LEVEL}")
