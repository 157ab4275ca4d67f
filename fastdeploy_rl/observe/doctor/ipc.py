"""Can this process and the other side share memory, host's and GPU's? Looked at before anything falls back silently.

Owns the comparison of two processes - namespaces, users, /dev/shm, descriptors, allocators, devices - and the options
of containers that mend each difference. What matters to CUDA memory only is a failure where a GPU is meant: where the
driver is loaded, or either side was told to use a device. Reads other processes through `Kernel`; the two things that
it tries out (a descriptor of the other side, CUDA memory between two children) are handed in.
"""

import ctypes
import errno
import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from fastdeploy_rl.errors import CudaError, CudaUnavailableError
from fastdeploy_rl.memory.cuda_devices import visible_devices
from fastdeploy_rl.observe.doctor import cuda_probe, machine
from fastdeploy_rl.observe.doctor.allocators import judge_allocator
from fastdeploy_rl.observe.doctor.check import Check, fail, ok, warn
from fastdeploy_rl.observe.doctor.device_choice import (
    SETTINGS,
    Choice,
    choice_of,
    judge_choice,
    judge_same_devices,
    judge_same_names,
    names_a_device,
)
from fastdeploy_rl.observe.doctor.kernel import FileIdentity, Kernel, Mount
from fastdeploy_rl.observe.doctor.peers import Peer, Sight, sight_of
from fastdeploy_rl.observe.doctor.text import quoted

PID_MEND = (
    "one PID namespace for both: docker --pid=host, or --pid=container:NAME on the second; kubernetes: one pod with "
    "shareProcessNamespace: true"
)
SHM_MEND = (
    "one /dev/shm for both: docker --ipc=host, or --ipc=shareable --shm-size=16g on the first and --ipc=container:NAME "
    "on the second; kubernetes: one pod, an emptyDir with medium: Memory at /dev/shm of both containers"
)
REACH_MEND = (
    "docker: --cap-add=SYS_PTRACE; kubernetes: securityContext.capabilities.add: [SYS_PTRACE]; or sysctl "
    "kernel.yama.ptrace_scope=0"
)
OPTIONS = (
    f"if trainer and engine run in two containers: {PID_MEND}; {SHM_MEND}; {REACH_MEND}; one user (docker: --user)"
)
_PIDFD_GETFD = 438
"""The call's number, the same on every architecture of Linux that CUDA runs on; Python has no function for it."""
_NO_CUDA_IPC = (
    f"in a container: {PID_MEND}; {REACH_MEND}; where the driver has no IPC at all (WSL 2, some virtual GPUs): "
    "--load-strategy ipc over host memory, or ipc_snapshot"
)


class Meant(NamedTuple):
    """Signs that CUDA memory is to be shared; none: only host memory."""

    signs: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.signs)


class Standing(NamedTuple):
    """Where the kernel has put a process; None for what cannot be seen."""

    pid_namespace: int | None
    ipc_namespace: int | None
    user_namespace: int | None
    user: int | None
    shm: FileIdentity | None

    @classmethod
    def of(cls, kernel: Kernel, process: str) -> "Standing":
        pid, ipc, user = (kernel.namespace(kind, process) for kind in ("pid", "ipc", "user"))
        shm = kernel.identity(f"/proc/{process}/root{machine.SHM}")
        return cls(pid, ipc, user, kernel.user(process), shm)


def find_signs(kernel: Kernel, peers: Sequence[Peer]) -> Meant:
    """Why a GPU is meant, for people."""
    own = choice_of(kernel.environ())
    seen = [peer for peer in peers if sight_of(kernel, peer) is Sight.OPEN]
    choices = [("this process", own), *((peer.who, choice_of(kernel.environ(peer.process))) for peer in seen)]
    is_loaded = machine.has_gpu(kernel) and not own.is_hiding_all
    named = [f"{who} has {choice}" for who, choice in choices if names_a_device(choice)]
    return Meant((*(["NVIDIA's driver is loaded"] if is_loaded else []), *named))


# --- this side -------------------------------------------------------------------------------------------------------


def check_this_side(kernel: Kernel, peers: Sequence[Peer], meant: Meant) -> list[Check]:
    """What needs no other side, and the probe."""
    environ = kernel.environ()
    return [
        ok("container", kernel.container() or "none that shows", OPTIONS),
        describe_peers(peers),
        judge_allocator(environ, bool(meant)),
        judge_choice(choice_of(environ)),
        probe_cuda(choice_of(environ), meant),
    ]


def describe_peers(peers: Sequence[Peer]) -> Check:
    if peers:
        return ok("other side", ", ".join(peer.who for peer in peers))
    return ok(
        "other side",
        "nobody lives on the channel or at a port: only this side was examined",
        "if one runs elsewhere: fastdeploy-rl doctor --ipc --peer PID, or --ipc-dir DIR of its channel",
    )


def probe_cuda(choice: Choice, meant: Meant) -> Check:
    """Memory of a device from one child process to another, by the very calls that trainer and engine use."""
    try:
        visible_devices()
    except CudaUnavailableError as error:
        return judge_no_driver(str(error), meant)
    settings = _relevant(choice)
    try:
        device = cuda_probe.share_memory(settings, choice.ordinal or 0)
    except CudaError as error:
        return fail("CUDA memory", f"cannot be shared between two processes here: {error}", _NO_CUDA_IPC)
    return ok("CUDA memory", f"shared between two processes of this container, on {device}")


def judge_no_driver(reason: str, meant: Meant) -> Check:
    """Nothing was tried: a failure where a GPU is meant."""
    if meant:
        found = f"not tried: {reason}; a GPU is meant: {'; '.join(meant.signs)}"
        mend = "docker: --gpus all, NVIDIA_DRIVER_CAPABILITIES=compute,utility; kubernetes: limits nvidia.com/gpu"
        return fail("CUDA memory", found, mend)
    mend = "where a GPU is meant, run this where its driver is; weights in host memory need none"
    return warn("CUDA memory", f"not tried: {reason}", mend)


# --- this side and another -------------------------------------------------------------------------------------------


def try_descriptor(pid: int) -> str:
    """Takes a copy of another process's descriptor and closes it, as torch's expandable segments need it; what the
    kernel answered, empty for yes."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        return f"pidfd_open: {error.strerror}"
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        descriptor = libc.syscall(_PIDFD_GETFD, pidfd, 0, 0)
        code = ctypes.get_errno()
    finally:
        os.close(pidfd)
    if descriptor >= 0:
        os.close(descriptor)
        return ""
    # The kernel asks for rights first: a descriptor that is not open there was allowed to be asked for.
    return "" if code == errno.EBADF else f"pidfd_getfd: {os.strerror(code)}"


def check_peer(kernel: Kernel, peer: Peer, meant: Meant, *, take: Callable[[int], str] = try_descriptor) -> list[Check]:
    """Everything that two processes must have in common. `take`: tries for a descriptor of a process."""
    sight = sight_of(kernel, peer)
    if sight is Sight.ABSENT:
        return [judge_absence(peer, bool(meant))]
    if sight is Sight.CLOSED:
        return [judge_closed(kernel, peer)]
    own, other = Standing.of(kernel, "self"), Standing.of(kernel, peer.process)
    environ = kernel.environ(peer.process)
    return [
        ok("process", f"{quoted(' '.join(kernel.arguments(peer.process)[:2])) or 'without a command line'}"),
        judge_user(own.user, other.user),
        judge_pid_namespaces(own.pid_namespace, other.pid_namespace, bool(meant)),
        judge_ipc_namespaces(own.ipc_namespace, other.ipc_namespace),
        judge_user_namespaces(own.user_namespace, other.user_namespace),
        judge_shared_shm(own.shm, other.shm, kernel.mount_at(machine.SHM, peer.process)),
        judge_descriptors(take(int(peer.process)), kernel, bool(meant)),
        judge_allocator(environ, bool(meant)),
        judge_choice(choice_of(environ)),
        compare_devices(choice_of(kernel.environ()), choice_of(environ)),
    ]


def judge_absence(peer: Peer, is_gpu_meant: bool) -> Check:
    if peer.lock is None:
        mend = f"take its pid from `ps` in this very container; if it runs in another one: {PID_MEND}"
        return fail("process", f"no process {peer.pid} is visible here", mend)
    found = f"alive, {peer.lock} says so, but not in this PID namespace"
    if is_gpu_meant:
        return fail("process", f"{found}: CUDA memory cannot be shared with it", PID_MEND)
    return warn("process", f"{found}: only host memory can be shared with it", PID_MEND)


def judge_closed(kernel: Kernel, peer: Peer) -> Check:
    user = kernel.user(peer.process)
    found = (
        f"process {peer.pid} of user {'unknown' if user is None else user} cannot be looked into: nothing was compared"
    )
    return fail("process", found, f"run the doctor as that user, or as root; in a container: {REACH_MEND}")


def judge_user(own: int | None, other: int | None) -> Check:
    if own == other:
        return ok("user", f"{own} on both sides")
    found = f"{own} here, {other} there: channels and boards are private to one user"
    return fail("user", found, "run both as one user (docker: --user; kubernetes: securityContext.runAsUser)")


def judge_pid_namespaces(own: int | None, other: int | None, is_gpu_meant: bool) -> Check:
    """CUDA's handles name their exporter by its pid (openucx/ucx #11512 and vllm #55906 show what comes of two)."""
    if own is not None and own == other:
        return ok("PID namespace", f"one for both ({own})")
    found = f"{_numbered(own)} here, {_numbered(other)} there"
    if is_gpu_meant:
        return fail("PID namespace", f"{found}: CUDA memory cannot be opened across", PID_MEND)
    return warn("PID namespace", f"{found}: only host memory can be shared", PID_MEND)


def judge_ipc_namespaces(own: int | None, other: int | None) -> Check:
    """By itself in nobody's way: what goes over it lies in /dev/shm, which is compared by itself."""
    if own is not None and own == other:
        return ok("IPC namespace", f"one for both ({own})")
    found = f"{_numbered(own)} here, {_numbered(other)} there: containers come with a /dev/shm each"
    return warn("IPC namespace", found, SHM_MEND)


def judge_user_namespaces(own: int | None, other: int | None) -> Check:
    if own is not None and own == other:
        return ok("user namespace", f"one for both ({own})")
    found = f"{_numbered(own)} here, {_numbered(other)} there: rights over the other side need its namespace's consent"
    return warn("user namespace", found, "docker: --userns=host for both, or the same daemon setting userns-remap")


def judge_shared_shm(own: FileIdentity | None, other: FileIdentity | None, mount: Mount | None) -> Check:
    """`mount`: of the other side."""
    if own is not None and own == other:
        return ok(machine.SHM, "one file system for both")
    if own is None or other is None:
        return warn(
            machine.SHM, "which one the other side has cannot be seen", f"run the doctor as root; else {SHM_MEND}"
        )
    kind = f"{mount.kind}, size={quoted(mount.option('size') or 'unknown')}" if mount else "no mount of its own"
    found = f"two file systems (there: {kind}): neither side finds the other's segments"
    return fail(machine.SHM, found, SHM_MEND)


def judge_descriptors(refusal: str, kernel: Kernel, is_gpu_meant: bool) -> Check:
    if not refusal:
        return ok("descriptors", "may be taken from the other side (pidfd_getfd)")
    scope = kernel.read("/proc/sys/kernel/yama/ptrace_scope").strip() or "absent"
    found = f"{refusal} (ptrace_scope {quoted(scope)}): expandable segments cannot be shared"
    if is_gpu_meant:
        return warn("descriptors", found, f"{REACH_MEND}; or no expandable segments on either side")
    return ok("descriptors", f"{found}; nothing else needs it")


def compare_devices(own: Choice, other: Choice) -> Check:
    """By UUID where a driver tells them, else by name."""
    if own.problem or other.problem or own.is_hiding_all or other.is_hiding_all:
        return judge_same_names(own, other)
    try:
        visible_devices()
    except CudaUnavailableError:
        return judge_same_names(own, other)
    try:
        listed = [cuda_probe.list_devices(_relevant(choice)) for choice in (own, other)]
    except CudaError as error:
        mend = "name devices that this container has too; docker: the same --gpus for both"
        return fail("same devices", f"the driver here gives none under the other side's settings: {error}", mend)
    return judge_same_devices(own.taken(listed[0]), other.taken(listed[1]))


def _relevant(choice: Choice) -> Mapping[str, str]:
    return {name: choice.settings[name] for name in SETTINGS if name in choice.settings}


def _numbered(namespace: int | None) -> str:
    return "unknown" if namespace is None else str(namespace)
