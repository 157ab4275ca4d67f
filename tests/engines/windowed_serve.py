"""`fastdeploy-rl serve ...` whose workers have a window (windowed_worker.py), and may die as often as a test wants:
python windowed_serve.py ARGUMENTS."""

import functools
import sys

from fastdeploy_rl.cli import main
from fastdeploy_rl.engines.embedded import supervisor

if __name__ == "__main__":
    supervisor.ServeConfig = functools.partial(supervisor.ServeConfig, worker_module="windowed_worker", max_deaths=1000)
    sys.exit(main(sys.argv[1:]))
