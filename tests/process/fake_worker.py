"""A worker without a model, for tests of the supervisor: module `fake_worker`.

$FAKE_WORKER says what goes wrong, on rank 1: "fail" tells an error at start, "die" ends without a word, "hang" never
gets ready, "stubborn" ignores every kind request to stop.
"""

import os
import select
import signal
import socket
import sys
import threading

import msgspec

from fastdeploy_rl.collectives.shm import ShmCollectives
from fastdeploy_rl.engines.embedded.messages import SLOT_BYTES, Failed, Ready, Stop, WorkerConfig, WorkerSocket
from fastdeploy_rl.engines.embedded.worker import die_with_parent


def main() -> int:
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=WorkerConfig)
    die_with_parent(config.parent_pid)
    connection = WorkerSocket(socket.socket(fileno=config.socket_fd))
    fault = os.environ.get("FAKE_WORKER", "") if config.rank == 1 else ""
    if fault == "fail":
        connection.send(Failed(config.rank, "CheckpointError", "model.safetensors: truncated"), timeout_s=5)
        return 2
    if fault == "die":
        print("about to die", flush=True)
        return 7
    if fault == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if fault != "hang":
        connection.send(Ready(config.rank, 1000 + config.rank, 0.5), timeout_s=5)
    _follow(config, connection, ignores_stop=fault in ("stubborn", "hang"))
    return 0


def _follow(config: WorkerConfig, connection: WorkerSocket, *, ignores_stop: bool) -> None:
    group = ShmCollectives(
        config.collectives_segment, config.rank, config.num_ranks, create=False, slot_bytes=SLOT_BYTES, timeout_s=60
    )
    if config.rank == 0:
        while not any(isinstance(message, Stop) for message in connection.receive()):
            select.select([connection], [], [], 60)
    group.broadcast_bytes(b"stop" if config.rank == 0 else None, 0, timeout_s=60)
    group.close()
    if ignores_stop:
        threading.Event().wait(60)


if __name__ == "__main__":
    sys.exit(main())
