"""Settings of allocators under which device memory has no handle for another process.

Owns the names and what each means. A handle of the CUDA driver (cuIpcGetMemHandle) is given for memory of cuMemAlloc
only: not for mapped physical memory, not for memory of a stream's pool, not for managed memory. Knows the settings that
stand in an environment; what a program sets later (`paddle.set_flags`, `torch.cuda.memory`) it cannot know.
"""

from collections.abc import Mapping
from typing import NamedTuple

from fastdeploy_rl.observe.doctor.check import Check, fail, ok, warn
from fastdeploy_rl.observe.doctor.text import quoted

_MAPPED = "physical memory that is mapped as it grows has no handle for another process"
_POOLED = "memory of a stream's pool has no handle for another process"
_MANAGED = "managed memory has no handle for another process"
_PADDLE_FLAGS: Mapping[str, str] = {
    "FLAGS_use_cuda_malloc_async_allocator": _POOLED,
    "FLAGS_use_virtual_memory_auto_growth": _MAPPED,
    "FLAGS_use_multi_scale_virtual_memory_auto_growth": _MAPPED,
    "FLAGS_use_vmm_auto_growth_best_fit_allocator_v2": _MAPPED,
    "FLAGS_use_vmm_v2": _MAPPED,
    "FLAGS_use_cuda_managed_memory": _MANAGED,
}
_HARMLESS = ("FLAGS_allocator_strategy", "FLAGS_use_auto_growth_v2", "FLAGS_auto_growth_chunk_size_in_mb")
"""They choose how cudaMalloc's memory is cut; one handle then gives away a whole chunk."""
_TORCH_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_TRUE = frozenset({"1", "true", "t", "yes", "y", "on"})


class Hindrance(NamedTuple):
    """`setting` as it stands in the environment, why it is in the way, and what to set in its place."""

    setting: str
    reason: str
    mend: str


def hindrances(environ: Mapping[str, str]) -> list[Hindrance]:
    """Every setting that is in the way."""
    return [*_of_paddle(environ), *(found for name in _TORCH_SETTINGS for found in _of_torch(name, environ))]


def judge_allocator(environ: Mapping[str, str], is_gpu_meant: bool) -> Check:
    found = hindrances(environ)
    if not found:
        chosen = [f"{name}={quoted(environ[name])}" for name in _HARMLESS if name in environ]
        told = f"nothing is in the way; {', '.join(chosen)} is cudaMalloc's memory too" if chosen else "as it comes"
        return ok("allocator", f"{told} (by the environment it was started with)")
    text = "; ".join(f"{each.setting}: {each.reason}" for each in found)
    mend = " and ".join(dict.fromkeys(each.mend for each in found)) + ", then start it again"
    if is_gpu_meant:
        return fail("allocator", text, mend)
    return warn("allocator", f"{text}; only CUDA memory is concerned", mend)


def _of_paddle(environ: Mapping[str, str]) -> list[Hindrance]:
    return [
        Hindrance(f"{name}={quoted(environ[name])}", reason, f"{name}=0")
        for name, reason in _PADDLE_FLAGS.items()
        if environ.get(name, "").strip().lower() in _TRUE
    ]


def _of_torch(name: str, environ: Mapping[str, str]) -> list[Hindrance]:
    """torch hands mapped memory over by pidfd_getfd, which containers forbid; its pool it does not hand over."""
    pairs = (entry.partition(":") for entry in environ.get(name, "").split(","))
    options = {key.strip().lower(): value.strip().lower() for key, _, value in pairs}
    found = []
    if options.get("expandable_segments") in _TRUE:
        reason = f"{_MAPPED}; torch's own way, pidfd_getfd, ends in 'Operation not permitted' in most containers"
        found.append(Hindrance(f"{name}=expandable_segments:True", reason, f"{name}=expandable_segments:False"))
    if options.get("backend") == "cudamallocasync":
        found.append(Hindrance(f"{name}=backend:cudaMallocAsync", _POOLED, f"{name}=backend:native"))
    return found
