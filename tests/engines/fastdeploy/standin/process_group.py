"""The process group of a worker's ranks: what paddle.distributed shuts down and restarts is real, what meets is ours.

Without NCCL, on a CPU. Invariant: ranks meet in a group that is up, or it is an error; FastDeploy's would hang or
crash."""

from fastdeploy_rl.collectives.shm import ShmCollectives


class _Members:
    """What Paddle knows as a group's `process_group`."""

    is_up = True

    def shutdown(self) -> None:
        self.is_up = False

    def restart(self) -> None:
        self.is_up = True


class ProcessGroup:
    """Of all ranks. `name` and `process_group` are Paddle's; there are collectives behind the rest."""

    def __init__(self, collectives: ShmCollectives, patience_s: float) -> None:
        self.name = "standin_tp_group"
        self.process_group = _Members()
        self._collectives = collectives
        self._patience_s = patience_s

    def barrier(self) -> None:
        self._check()
        self._collectives.barrier()

    def broadcast(self, value: int, src: int) -> int:
        """One small signed number."""
        self._check()
        told = self._collectives.broadcast_bytes(
            value.to_bytes(1, "little", signed=True), src, timeout_s=self._patience_s
        )
        return int.from_bytes(told, "little", signed=True)

    def _check(self) -> None:
        if not self.process_group.is_up:
            raise RuntimeError("a process group that was shut down is used: FastDeploy's would hang")
