"""What this machine and container offer: shared memory, limits, namespaces, packages.

Owns the judgement and the mends. Reads through `Kernel` only and asks no engine, so that it works with nothing but the
Python standard library and msgspec: a machine on which the native core does not load can still be examined.
"""

import os
import re
import resource
import sys
from importlib import metadata
from pathlib import Path

from fastdeploy_rl.observe.doctor.check import Check, fail, ok, warn
from fastdeploy_rl.observe.doctor.kernel import (
    INITIAL_NAMESPACES,
    Kernel,
    MemoryLimit,
    Mount,
    has_capability,
)
from fastdeploy_rl.observe.sizes import size_text

SHM = "/dev/shm"
LITTLE_SHM_BYTES = 1 << 30
NO_SHM_BYTES = 1 << 20
"""Board, status words and collectives of one engine need about this much, before any weights."""
LITTLE_MEMORY_BYTES = 1 << 30
FEW_FILES = 1024
_SHM_MEND = (
    "docker: --shm-size=16g, or --ipc=host; kubernetes: an emptyDir with medium: Memory at /dev/shm; "
    "else: mount -o remount,size=16G /dev/shm"
)
_CAP_SYS_PTRACE = 19


def has_gpu(kernel: Kernel) -> bool:
    """Is NVIDIA's driver loaded?"""
    return kernel.exists("/proc/driver/nvidia/version")


# --- /dev/shm --------------------------------------------------------------------------------------------------------


def check_shared_memory(kernel: Kernel) -> list[Check]:
    mount = kernel.mount_at(SHM)
    space = os.statvfs(SHM)
    return [
        judge_shm_kind(mount),
        judge_shm_size(space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize),
        judge_shm_rights(os.access(SHM, os.W_OK | os.X_OK), mount),
        describe_huge_pages(mount, kernel.read("/sys/kernel/mm/transparent_hugepage/shmem_enabled")),
    ]


def judge_shm_kind(mount: Mount | None) -> Check:
    if mount is None:
        return warn(
            "mount", f"nothing is mounted at {SHM}: what lies there may go to a disk", f"mount a tmpfs: {_SHM_MEND}"
        )
    if mount.kind != "tmpfs":
        return warn("mount", f"{SHM} is {mount.kind}, not tmpfs: it may be slow", f"mount a tmpfs: {_SHM_MEND}")
    return ok("mount", f"tmpfs, {','.join(dict.fromkeys(mount.options))}")


def judge_shm_size(total_bytes: int, free_bytes: int) -> Check:
    """Both of /dev/shm, as this user may use it."""
    found = f"{size_text(total_bytes)}, {size_text(free_bytes)} free"
    if free_bytes < NO_SHM_BYTES:
        full = f"{found}: not even an engine without weights fits"
        return fail("size", full, f"fastdeploy-rl doctor --clean, if something of the dead lies there; {_SHM_MEND}")
    if free_bytes < LITTLE_SHM_BYTES:
        return warn("size", f"{found}: a publisher keeps two or three versions of the weights there", _SHM_MEND)
    return ok("size", found)


def judge_shm_rights(is_writable: bool, mount: Mount | None) -> Check:
    if mount is not None and "ro" in mount.options:
        return fail("rights", f"{SHM} is mounted read-only", "docker: leave --read-only, or add --tmpfs /dev/shm:rw")
    if not is_writable:
        return fail("rights", f"user {os.geteuid()} cannot make files in {SHM}", f"chmod 1777 {SHM}, as root")
    return ok("rights", f"user {os.geteuid()} can make segments")


def describe_huge_pages(mount: Mount | None, shmem_enabled: str) -> Check:
    """Never a problem: told because it explains speed."""
    chosen = re.search(r"\[(\w+)\]", shmem_enabled)
    system = chosen[1] if chosen else "unknown"
    option = mount.option("huge") if mount is not None else None
    return ok("huge pages", f"mount option huge={option or 'never'}, system {system}")


# --- limits ----------------------------------------------------------------------------------------------------------


def check_limits(kernel: Kernel) -> list[Check]:
    return [
        judge_memory(kernel.available_bytes(), kernel.memory_limit()),
        judge_memlock(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], has_gpu(kernel)),
        judge_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
    ]


def judge_memory(available_bytes: int | None, limit: MemoryLimit | None) -> Check:
    """`available_bytes` of the machine, `limit` of the container."""
    room = [
        size for size in (available_bytes, limit and max(limit.limit_bytes - limit.used_bytes, 0)) if size is not None
    ]
    found = f"{size_text(available_bytes)} available" if available_bytes is not None else "unknown"
    if limit is not None:
        used = f"{size_text(limit.used_bytes)} of {size_text(limit.limit_bytes)}"
        found += f"; this container uses {used}, shared memory included"
    if room and min(room) < LITTLE_MEMORY_BYTES:
        return warn(
            "memory", found, "free some, or raise the limit (docker: --memory; kubernetes: resources.limits.memory)"
        )
    return ok("memory", found if limit is not None else f"{found}; no limit of a container")


def judge_memlock(limit_bytes: int, is_gpu_machine: bool) -> Check:
    if limit_bytes == resource.RLIM_INFINITY:
        return ok("locked memory", "unlimited")
    found = f"{size_text(limit_bytes)} may be locked"
    if is_gpu_machine:
        return warn(
            "locked memory",
            f"{found}: too little for pinned buffers and RDMA",
            "ulimit -l unlimited (docker: --ulimit memlock=-1)",
        )
    return ok("locked memory", f"{found}; only RDMA and pinned buffers need it")


def judge_open_files(soft: int, hard: int) -> Check:
    if soft == resource.RLIM_INFINITY:
        return ok("open files", "unlimited")
    if soft < FEW_FILES:
        most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
        return warn(
            "open files", f"{soft} at most, {most} allowed", f"ulimit -n {FEW_FILES * 4} (docker: --ulimit nofile=4096)"
        )
    return ok("open files", f"{soft} at most")


# --- namespaces ------------------------------------------------------------------------------------------------------


def check_namespaces(kernel: Kernel) -> list[Check]:
    container, gpu = kernel.container(), has_gpu(kernel)
    return [
        ok("container", container or "none that shows"),
        judge_ipc_namespace(kernel.namespace("ipc"), container),
        judge_pid_namespace(kernel.namespace("pid"), gpu),
        ok("user namespace", describe_namespace("user", kernel.namespace("user"), kernel.namespace("user", "1"))),
        judge_reach(kernel.read("/proc/sys/kernel/yama/ptrace_scope"), kernel.read("/proc/self/status"), gpu),
        describe_processes(kernel, os.geteuid()),
    ]


def describe_namespace(kind: str, own: int | None, first: int | None) -> str:
    """Whose it is, seen from here; `first` is that of process 1."""
    if own is None:
        return "unknown: /proc does not show it"
    if own == INITIAL_NAMESPACES.get(kind):
        return "the machine's"
    return f"its own ({own})" if first in (own, None) else f"its own ({own}), not that of process 1 ({first})"


def judge_ipc_namespace(own: int | None, container: str) -> Check:
    found = describe_namespace("ipc", own, None)
    if not container or own == INITIAL_NAMESPACES["ipc"]:
        return ok("IPC namespace", found)
    mend = (
        "if trainer and engine run in two containers, both must see one /dev/shm: docker --ipc=host, or "
        "--ipc=shareable and --ipc=container:NAME; kubernetes: one pod, an emptyDir with medium: Memory at /dev/shm"
    )
    return ok("IPC namespace", found, mend)


def judge_pid_namespace(own: int | None, is_gpu_machine: bool) -> Check:
    found = describe_namespace("pid", own, None)
    if not is_gpu_machine or own == INITIAL_NAMESPACES["pid"]:
        return ok("PID namespace", found)
    mend = (
        "if trainer and engine run in two containers, CUDA memory needs one PID namespace: docker --pid=host or "
        "--pid=container:NAME; kubernetes: shareProcessNamespace: true"
    )
    return ok("PID namespace", found, mend)


def judge_reach(ptrace_scope: str, status: str, is_gpu_machine: bool) -> Check:
    """May a process take a descriptor from another one of this user, as CUDA memory of growing segments needs it?"""
    scope = int(ptrace_scope) if ptrace_scope.strip().isdigit() else 0
    if scope == 0 or has_capability(status, _CAP_SYS_PTRACE):
        return ok("reach", "processes of this user may open each other's descriptors")
    found = f"ptrace_scope {scope}: processes of this user cannot open each other's descriptors"
    if not is_gpu_machine:
        return ok("reach", f"{found}; only CUDA memory needs it")
    mend = (
        "docker: --cap-add=SYS_PTRACE; or sysctl kernel.yama.ptrace_scope=0; or no growing segments: "
        "FLAGS_use_virtual_memory_auto_growth=0 (Paddle), PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False (torch)"
    )
    return warn("reach", f"{found} (pidfd_getfd: Operation not permitted)", mend)


def describe_processes(kernel: Kernel, user: int) -> Check:
    own = [pid for pid in os.listdir("/proc") if pid.isdigit() and _owner_of(f"/proc/{pid}") == user]
    parent = os.getppid()
    if parent == 0:
        return ok("processes", f"{len(own)} of this user are visible; our parent lives in another PID namespace")
    seen = "can be looked at" if kernel.link(f"/proc/{parent}/ns/pid") else "cannot be looked at"
    return ok("processes", f"{len(own)} of this user are visible; our parent ({parent}) {seen}")


def _owner_of(path: str) -> int | None:
    try:
        return os.stat(path).st_uid
    except FileNotFoundError:
        return None


# --- packages --------------------------------------------------------------------------------------------------------

_PADDLES = ("paddlepaddle", "paddlepaddle-gpu")


def check_packages() -> list[Check]:
    """By their metadata: importing Paddle would take seconds."""
    lines = metadata.requires("fastdeploy_rl") or []
    core, engine = (needed_versions(of_extra(lines, extra)) for extra in ("", "engine"))
    python = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro} at {sys.executable}"
    return [
        ok("python", python),
        ok("fastdeploy_rl", f"{metadata.version('fastdeploy_rl')} at {Path(__file__).parents[2]}"),
        *(judge_package(name, version_of(name), needed, is_core=True) for name, needed in core.items()),
        judge_paddle({name: version for name in _PADDLES if (version := version_of(name))}, needed_versions(lines)),
        *(judge_package(name, version_of(name), needed, is_core=False) for name, needed in engine.items()),
    ]


def version_of(package: str) -> str:
    """Empty where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def of_extra(requirements: list[str], extra: str) -> list[str]:
    """The lines that belong to an extra; with an empty one, those that everybody needs."""
    found = [(re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", line), line) for line in requirements]
    return [line for match, line in found if (match[1] if match else "") == extra]


def needed_versions(requirements: list[str]) -> dict[str, str]:
    """Package -> least version, of lines like `numpy>=1.26; extra == "x"`."""
    matches = (re.match(r"([A-Za-z0-9_.-]+)\s*>=\s*([0-9.]+)", line) for line in requirements)
    return {match[1]: match[2] for match in matches if match}


def is_older(version: str, needed: str) -> bool:
    """Compares the leading numbers; what is not a number ends the comparison."""
    return _numbers(version) < _numbers(needed)


def judge_package(name: str, version: str, needed: str, *, is_core: bool) -> Check:
    if not version and not is_core:
        return ok(name, "not installed; comes with fastdeploy_rl[engine]")
    if not version or is_older(version, needed):
        found = f"{version or 'not installed'}; {needed or 'any'} or later is needed"
        return fail(name, found, f"pip install '{name}>={needed}'" if needed else f"pip install {name}")
    return ok(name, version)


def judge_paddle(installed: dict[str, str], needed: dict[str, str]) -> Check:
    """`installed`: package -> version, of the builds that are there."""
    if not installed:
        return ok(
            "paddle",
            "not installed; a trainer on torch or numpy needs none",
            "if an engine is to run here: pip install '/path/to/fastdeploy_rl[engine,cpu]'",
        )
    found = ", ".join(f"{name} {version}" for name, version in installed.items())
    if len(installed) > 1:
        return fail(
            "paddle", f"{found}: they overwrite each other", "pip uninstall both, then install the one that is wanted"
        )
    (name, version), *_ = installed.items()
    if is_older(version, needed.get(name, "")):
        return fail("paddle", f"{found}; {needed[name]} or later is needed", f"pip install '{name}>={needed[name]}'")
    return ok("paddle", found)


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
