"""The command line `fastdeploy-rl`: thin verbs, one file each.

Owns argument parsing, the form of errors and exit codes. Refuses to do work: each verb calls what a program would
call. `--help` is fast, since a verb imports what it needs when it runs. Exit codes: 0, 1 engine or world, 2 caller or
trainer (errors.py), 130 interrupted.
"""

from fastdeploy_rl.cli.main import main

__all__ = ["main"]
