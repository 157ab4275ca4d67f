"""`scripts/fuzz` with a fault in a reader, named by the variable PLANTED: what it must find."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import fuzz_run

from fastdeploy_rl.publish.channel import Channel


def _wrong(channel: Channel) -> int:
    raise ValueError("planted")


def _crash(channel: Channel) -> int:
    os.kill(os.getpid(), signal.SIGBUS)
    return 0


def _slow(channel: Channel) -> int:
    time.sleep(60)  # what is to be noticed
    return 0


FAULTS: dict[str, Callable[[Channel], int]] = {"wrong": _wrong, "crash": _crash, "slow": _slow}

if __name__ == "__main__":
    Channel.read_epoch = FAULTS[os.environ["PLANTED"]]
    sys.exit(fuzz_run.main())
