"""Cases of `test_real_words.py`, in FastDeploy's process: its IPCSignal, asked from outside."""

import time
from typing import Any

import numpy as np
from fastdeploy.inter_communicator import IPCSignal, KVCacheStatus, ModelWeightsStatus, PrefixTreeStatus

_signals: dict[tuple[str, int], IPCSignal] = {}


def values() -> dict[str, dict[str, int]]:
    """The words' values, as FastDeploy names them."""
    kinds = (ModelWeightsStatus, KVCacheStatus, PrefixTreeStatus)
    return {kind.__name__: {name: value for name, value in vars(kind).items() if name.isupper()} for kind in kinds}


def create(name: str, port: int, value: int = 0) -> str:
    """As FastDeploy's engine does; the name in /dev/shm."""
    signal = IPCSignal(name=name, array=np.full([1], value, np.int32), dtype=np.int32, suffix=port, create=True)
    _signals[name, port] = signal
    return str(signal.shm.name)


def attach(name: str, port: int) -> int:
    signal = IPCSignal(name=name, array=np.zeros([1], np.int32), dtype=np.int32, suffix=port, create=False)
    _signals[name, port] = signal
    return int(signal.value[0])


def load(name: str, port: int) -> int:
    return int(_signals[name, port].value[0])


def store(name: str, port: int, value: int) -> None:
    _signals[name, port].value[0] = value


def answer(name: str, port: int, command: int, outcome: int, within_s: float) -> Any:
    """As a stock worker: waits for a command, ends it."""
    word = _signals[name, port].value
    deadline = time.monotonic() + within_s
    while word[0] != command:
        if time.monotonic() > deadline:
            return int(word[0])
        time.sleep(0.001)
    word[0] = outcome
    return command


def clear(name: str, port: int) -> None:
    _signals.pop((name, port)).clear()
