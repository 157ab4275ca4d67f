"""`python -m fastdeploy_rl.cli`: the command line without its installed script."""

import sys

from fastdeploy_rl.cli import main

if __name__ == "__main__":
    sys.exit(main())
