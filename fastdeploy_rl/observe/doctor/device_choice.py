"""Which GPUs a process was told to use, and whether two processes mean the same ones.

Owns the reading of CUDA_VISIBLE_DEVICES, FLAGS_selected_gpus and NVIDIA_VISIBLE_DEVICES. Starts no driver: what an
index stands for is asked of whoever can start one under the same settings. Invariant: devices are the same where their
UUIDs are; equal indices count only under equal settings.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fastdeploy_rl.errors import ConfigurationError
from fastdeploy_rl.memory.cuda_devices import parse_selector
from fastdeploy_rl.observe.doctor.check import Check, fail, ok, warn
from fastdeploy_rl.observe.doctor.text import quoted

VISIBLE, SELECTED, CONTAINER, ORDER = (
    "CUDA_VISIBLE_DEVICES",
    "FLAGS_selected_gpus",
    "NVIDIA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
)
SETTINGS = (VISIBLE, SELECTED, CONTAINER, ORDER)
_HIDING = ("", "-1", "nodevfiles")
_NO_DEVICE = ("none", "void")
_NAME_MEND = f"name devices as `nvidia-smi -L` does, by GPU-UUID or MIG-UUID, in {VISIBLE} of both sides"
_SAME_MEND = (
    f"give both sides the same GPUs: {VISIBLE} by UUID; docker: --gpus '\"device=GPU-UUID\"' for both; kubernetes: "
    "both containers in one pod that shares the claim"
)


class Choice(NamedTuple):
    """As one environment has it. `names`: the devices that the process uses, as indices or identifiers, None for all
    there are; `ordinal`: which of the visible ones FLAGS_selected_gpus takes, None for all; `problem`: why it means
    nothing."""

    names: tuple[str, ...] | None
    ordinal: int | None
    settings: Mapping[str, str]
    problem: str = ""

    @property
    def is_hiding_all(self) -> bool:
        return self.names == ()

    def __str__(self) -> str:
        return (
            ", ".join(f"{name}={quoted(value)}" for name, value in self.settings.items()) or "no setting: all devices"
        )

    def taken(self, devices: Sequence[str]) -> list[str]:
        """Of the driver's list under these settings, those that the process uses."""
        return list(devices) if self.ordinal is None else list(devices[self.ordinal : self.ordinal + 1])


def choice_of(environ: Mapping[str, str]) -> Choice:
    settings = {name: environ[name] for name in SETTINGS if name in environ}
    names = _visible_names(environ.get(VISIBLE))
    ordinal, problem = _selected(environ.get(SELECTED, ""), names)
    if not problem:
        problem = next((text for name in names or () if (text := _why_none(name))), "")
    if ordinal is not None and not problem:
        names = (str(ordinal),) if names is None else names[ordinal : ordinal + 1]
    return Choice(names, ordinal, settings, problem)


def names_a_device(choice: Choice) -> bool:
    """Was a GPU asked for? NVIDIA_VISIBLE_DEVICES does not count: images carry it to machines without one."""
    return bool(choice.names)


def judge_choice(choice: Choice) -> Check:
    """One side by itself."""
    if choice.problem:
        return fail("devices", f"{choice}: {choice.problem}", _NAME_MEND)
    if choice.is_hiding_all:
        return warn("devices", f"{choice}: every device is hidden, only host memory can be shared", f"unset {VISIBLE}")
    if choice.settings.get(CONTAINER, "").strip().lower() in _NO_DEVICE:
        mend = "docker: --gpus all; kubernetes: resources.limits nvidia.com/gpu: 1"
        return warn("devices", f"{choice}: this container was given no GPU, only host memory can be shared", mend)
    return ok("devices", str(choice))


def judge_same_devices(own: Sequence[str], other: Sequence[str]) -> Check:
    """UUIDs that the driver gave under each side's settings."""
    common = [device for device in other if device in own]
    if not common:
        found = f"here {_listed(own)}, there {_listed(other)}: CUDA memory opens on its own device only"
        return fail("same devices", found, _SAME_MEND)
    rest = [device for device in (*own, *other) if device not in common]
    return ok(
        "same devices", f"both sides have {_listed(common)}" + (f"; one side only: {_listed(rest)}" if rest else "")
    )


def judge_same_names(own: Choice, other: Choice) -> Check:
    """Without a driver: by what was written down."""
    if own.problem or other.problem:
        return warn("same devices", "cannot be compared: one side's setting means nothing", _NAME_MEND)
    if own.names is None and other.names is None:
        return ok("same devices", "no setting on either side: all devices on both")
    if own.is_hiding_all or other.is_hiding_all:
        return _judge_hidden(own, other)
    if own.names is None or other.names is None:
        return warn("same devices", "one side names devices, the other sees all: an index may differ", _NAME_MEND)
    if {_is_index(name) for name in own.names} != {_is_index(name) for name in other.names}:
        found = f"here {_listed(own.names)}, there {_listed(other.names)}: without a driver nobody can tell"
        return warn("same devices", found, _NAME_MEND)
    if not any(_is_same(name, there) for name in own.names for there in other.names):
        return fail("same devices", f"here {_listed(own.names)}, there {_listed(other.names)}", _SAME_MEND)
    if all(map(_is_index, own.names)) and _differs(own, other, (CONTAINER, ORDER)):
        found = f"the same indices, but another {CONTAINER} or {ORDER}: an index may mean another GPU there"
        return warn("same devices", found, _NAME_MEND)
    return ok("same devices", f"both sides name {_listed(other.names)}")


def _judge_hidden(own: Choice, other: Choice) -> Check:
    if own.is_hiding_all and other.is_hiding_all:
        return ok("same devices", "none on either side")
    found = f"every device is hidden {'here' if own.is_hiding_all else 'there'}"
    if names_a_device(own) or names_a_device(other):
        return fail(
            "same devices", f"{found}, the other side names {_listed(own.names or other.names or ())}", _SAME_MEND
        )
    return warn("same devices", f"{found}, and not on the other side", _SAME_MEND)


def _visible_names(value: str | None) -> tuple[str, ...] | None:
    if value is None:
        return None
    names = [name.strip() for name in value.split(",")]
    return () if names[0].lower() in _HIDING else tuple(names)


def _selected(text: str, names: Sequence[str] | None) -> tuple[int | None, str]:
    """The ordinal, and what is wrong with it. Paddle's launcher gives each rank one."""
    if not text.strip():
        return None, ""
    if not text.strip().isdecimal() or len(text) > 4:
        several = "," in text
        return None, "" if several else f"{SELECTED} must be an ordinal among the visible devices"
    ordinal = int(text)
    if names is not None and ordinal >= len(names):
        return None, f"{SELECTED} takes number {ordinal} of {len(names)} visible devices"
    return ordinal, ""


def _why_none(name: str) -> str:
    try:
        parse_selector(name)
    except ConfigurationError as error:
        return str(error)
    return ""


def _is_index(name: str) -> bool:
    return name.isdecimal()


def _is_same(name: str, other: str) -> bool:
    """Equal indices, or identifiers of which one is the beginning of the other."""
    if _is_index(name) or _is_index(other):
        return name == other
    first, second = name.lower(), other.lower()
    return first.startswith(second) or second.startswith(first)


def _differs(own: Choice, other: Choice, names: Sequence[str]) -> bool:
    return any(own.settings.get(name) != other.settings.get(name) for name in names)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(quoted, names)) or "none"
