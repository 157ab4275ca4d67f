"""A worker without a model, for tests of the supervisor: module `fake_worker`.

$FAKE_WORKER says what goes wrong, on rank 1: "fail" tells an error at start, "die" ends without a word, "hang" never
gets ready, "stubborn" ignores every kind request to stop, "die again" ends without a word when it is started again,
"garble" says what is no message when it gets SIGUSR1.
"""

import os
import select
import signal
import socket
import sys
import threading
import time

import msgspec

from fastdeploy_rl.board.board import Board
from fastdeploy_rl.collectives.shm import ShmCollectives
from fastdeploy_rl.engines.embedded.messages import SLOT_BYTES, Failed, Ready, Stop, WorkerConfig, WorkerSocket
from fastdeploy_rl.engines.embedded.worker import die_with_parent
from fastdeploy_rl.errors import PeerLostError

DEADLINE_S = 60


def main() -> int:
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=WorkerConfig)
    die_with_parent(config.parent_pid)
    connection = WorkerSocket(socket.socket(fileno=config.socket_fd))
    board = Board.attach(config.board_port)
    fault = os.environ.get("FAKE_WORKER", "") if config.rank == 1 else ""
    if fault == "fail":
        connection.send(Failed(config.rank, "CheckpointError", "model.safetensors: truncated"), timeout_s=5)
        return 2
    if fault == "die" or (fault == "die again" and board.generation > 1):
        print("about to die", flush=True)
        return 7
    if fault == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if fault == "garble":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        threading.Thread(target=_garble_when_told, args=(config.socket_fd,), daemon=True).start()
    board.mark_back(config.rank)
    if fault != "hang":
        connection.send(Ready(config.rank, 1000 + config.rank, 0.5), timeout_s=5)
    _follow(config, board, connection)
    if fault in ("stubborn", "hang"):
        threading.Event().wait(DEADLINE_S)
    return 0


def _garble_when_told(fd: int) -> None:
    if signal.sigtimedwait({signal.SIGUSR1}, DEADLINE_S):
        os.write(fd, b"\x01\x00\x00\x00\xc1")


def _follow(config: WorkerConfig, board: Board, connection: WorkerSocket) -> None:
    """Until the supervisor said stop, and all met."""
    with ShmCollectives(
        config.collectives_segment,
        config.rank,
        config.num_ranks,
        create=False,
        slot_bytes=SLOT_BYTES,
        timeout_s=DEADLINE_S,
        generation=0,
    ) as group:
        if config.rank == 0:
            while not any(isinstance(message, Stop) for message in connection.receive()):
                select.select([connection], [], [], DEADLINE_S)
        while not _met(board, group):
            pass


def _met(board: Board, group: ShmCollectives) -> bool:
    own, deadline_ns = group.generation, time.monotonic_ns() + DEADLINE_S * 10**9
    if not board.wait_until(lambda: board.generation > own, deadline_ns):
        raise PeerLostError("no newer generation")
    try:
        group.rejoin(board.generation)
        group.broadcast_bytes(b"stop" if group.rank == 0 else None, 0, timeout_s=DEADLINE_S)
    except PeerLostError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
