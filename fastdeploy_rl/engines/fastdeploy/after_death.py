"""Names in shared memory that must go when their process ends without a word.

FastDeploy ends its workers with SIGTERM, and they have no say in it: a handler of ours would not run while a worker
waits in a collective, and would keep it from dying there. So Python's resource tracker is told, a process that outlives
its worker and unlinks what that had; FastDeploy's words have it running anyway. Owns the registration. Invariant: what
is registered here is this process's own, never a segment of FastDeploy's."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker

_KIND = "shared_memory"


@contextmanager
def removed_after_death(names: Sequence[str]) -> Iterator[None]:
    """`names`: of segments as in /dev/shm. Inside, a death of this process removes them, a moment later."""
    for name in names:
        resource_tracker.register(f"/{name}", _KIND)
    try:
        yield
    finally:
        for name in names:
            resource_tracker.unregister(f"/{name}", _KIND)
