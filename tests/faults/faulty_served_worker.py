"""The engine's own worker with a window (windowed_worker.py), and with a StepObserver that lets things go wrong.

Whoever connects to the abstract socket $WINDOW.RANK.faults writes one line: a StepFault to arm, answered "armed", or
"disarm", answered with whether one was armed that did not happen. Found by the name of its file: see faulty_serve.py.
"""

import functools
import json
import os
import socket
import sys
import threading

import msgspec
import windowed_worker
from windowed_worker import rank, worker

from fastdeploy_rl.testing.step_faults import StepFault, StepFaults


def _answer(window: socket.socket, faults: StepFaults) -> None:
    while True:
        visitor, _ = window.accept()
        with visitor, visitor.makefile("rw") as lines:
            line = lines.readline().strip()
            if line == "disarm":
                answer: object = faults.disarm()
            else:
                faults.arm(msgspec.json.decode(line, type=StepFault))
                answer = "armed"
            lines.write(json.dumps(answer) + "\n")


class FaultyRunner(windowed_worker.WindowedRunner):
    """Made before the manager, so that this is where the rank is known."""

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)
        faults = StepFaults()
        rank.DynamicWeightManager = functools.partial(rank.DynamicWeightManager, observer=faults)
        window = socket.create_server(f"\0{os.environ['WINDOW']}.{self.rank}.faults", family=socket.AF_UNIX)
        threading.Thread(target=_answer, args=(window, faults), name="faults", daemon=True).start()


if __name__ == "__main__":
    rank.EmbeddedRunner = FaultyRunner
    sys.exit(worker.main())
