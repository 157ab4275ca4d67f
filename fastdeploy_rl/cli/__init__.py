"""The command line `fastdeploy-rl`: thin verbs, one file each.

Owns argument parsing, the form of errors and exit codes. Refuses to do work: each verb calls what a program would
call. `--help` is fast, since a verb imports what it needs when it runs. Exit codes: 0, 1 engine or world, 2 caller or
trainer (errors.py), 130 interrupted.
"""

from collections.abc import Sequence

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """The installed script; returns the exit code. Ctrl-C ends it quietly from the first import on."""
    try:
        from fastdeploy_rl.cli.dispatch import run

        return run(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
