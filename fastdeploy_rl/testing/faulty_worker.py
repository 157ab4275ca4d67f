"""A worker of the numpy engine that can be told at which step of an update something goes wrong.

As engines/numpy/worker.py, with more questions on standard input: `fault {"act": "kill", "step": "install", "when":
"end"}` arms a StepFault and is answered "armed"; `disarm` is answered with whether one was armed that did not happen;
`linger SECONDS`: once the next version is committed the loop takes so long for one step, and is answered "will linger".
"""

import sys
import time
from typing import Any

import msgspec

from fastdeploy_rl.engines.numpy.worker import Worker, WorkerConfig, main
from fastdeploy_rl.testing.step_faults import StepFault, StepFaults


class FaultyWorker(Worker):
    """One rank with its faults."""

    def __init__(self, config: WorkerConfig, faults: StepFaults) -> None:
        super().__init__(config, faults)
        self._faults = faults
        self._linger_s = 0.0

    def _step(self) -> bool:
        version = self.runner.version
        is_open = super()._step()
        if self.runner.version != version:
            linger_s, self._linger_s = self._linger_s, 0.0
            time.sleep(linger_s)
        return is_open

    def _answer(self, question: str) -> Any:
        if question == "disarm":
            return self._faults.disarm()
        if question.startswith("fault "):
            self._faults.arm(msgspec.json.decode(question.removeprefix("fault "), type=StepFault))
            return "armed"
        if question.startswith("linger "):
            self._linger_s = float(question.removeprefix("linger "))
            return "will linger"
        return super()._answer(question)


if __name__ == "__main__":
    sys.exit(main(lambda config: FaultyWorker(config, StepFaults())))
