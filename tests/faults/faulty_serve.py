"""`fastdeploy-rl serve ...` whose workers can be told what goes wrong (faulty_served_worker.py), and may die as often
as a test wants; the deadlines are the tests' own: python faulty_serve.py DEADLINES ARGUMENTS."""

import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from fastdeploy_rl.cli import main
from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.engines.embedded import supervisor

_ServeConfig = supervisor.ServeConfig


def _config(**settings: Any) -> supervisor.ServeConfig:
    deadlines = msgspec.json.decode(sys.argv[1], type=Deadlines)
    ours = {"worker_module": "faulty_served_worker", "max_deaths": 1000, "deadlines": deadlines}
    return _ServeConfig(**settings | ours)


if __name__ == "__main__":
    # The workers find the modules of their windows by name.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ["PYTHONPATH"]])
    supervisor.ServeConfig = _config
    sys.exit(main(sys.argv[2:]))
