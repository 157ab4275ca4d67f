"""The whole examination, as a list of sections: what the verb `doctor` prints, and a program may read.

Owns the order and what happens when a section cannot be looked at: that is a finding too, and the others go on.
"""

from collections.abc import Callable
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


class Examination(msgspec.Struct, frozen=True):
    """What was found, after what was `removed` went."""

    status: Status
    sections: list[Section]
    removed: list[Removed]


def examine(
    channel: Path | None = None, *, engine: int | None = None, clean: bool = False, kernel: Kernel | None = None
) -> Examination:
    """Looks at this machine, one channel (None: the default one) and the engines (or the one at port `engine`). Reads
    only, unless `clean`: then first removes what the dead left. Imports neither Paddle nor torch; blocks for nobody."""
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
