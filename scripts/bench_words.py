"""How soon the engine hears a signal: from the trainer's store
into the status word to the wait of rank 0's coordinator."""

import secrets
import statistics
import subprocess
import sys
import time

from bench_row import Row, at_most

from fastdeploy_rl import _native
from fastdeploy_rl.board.board import Board
from fastdeploy_rl.board.legacy import WEIGHTS_WORD, StatusWord

SIGNALS = 301
LISTENER = """
import sys, time
from fastdeploy_rl import _native
from fastdeploy_rl.board import layout
from fastdeploy_rl.board.board import Board
from fastdeploy_rl.board.legacy import WEIGHTS_WORD, StatusWord
from fastdeploy_rl.update.coordinator import WATCH_PERIOD_US
board = Board.attach(int(sys.argv[1]))
word = StatusWord(WEIGHTS_WORD, board.port)
watcher = _native.WordWatcher(word.mapping, 0, board.mapping, layout.DOORBELL_OFFSET, WATCH_PERIOD_US)
heard = _native.load_i32(board.mapping, layout.DOORBELL_OFFSET)
print("ready", flush=True)
for _ in range(int(sys.argv[2])):
    heard = board.wait_doorbell(heard, time.monotonic_ns() + 10**10)
    print(time.monotonic_ns(), flush=True)
watcher.stop()
word.close()
board.close()
"""


def word_rows() -> list[Row]:
    woken, plain = _delays(wakes=True), _delays(wakes=False)
    return [
        at_most("wake-up by signal (our store)", woken, "s", "100 us", 100e-6, 100e-6, "< 100 us"),
        at_most("wake-up by a foreign plain store", plain, "s", "10 ms", 0.010, 0.010, "< 10 ms"),
    ]


def _delays(wakes: bool) -> float:
    """Median seconds from the store to the listener's return, in another process."""
    board = Board.create(20000 + secrets.randbelow(40000), num_ranks=1)
    word = StatusWord(WEIGHTS_WORD, board.port)
    command = [sys.executable, "-c", LISTENER, str(board.port), str(SIGNALS)]
    delays = []
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as listener:
            listener.stdout.readline()
            for number in range(SIGNALS):
                time.sleep(0.003)  # signals are rare: the listener sleeps deeply before each
                stored = time.monotonic_ns()
                if wakes:
                    word.store(number + 1)
                else:
                    _native.store_i32(word.mapping, 0, number + 1)
                delays.append(int(listener.stdout.readline()) - stored)
    finally:
        word.close()
        board.close()
    return statistics.median(delays) / 1e9
