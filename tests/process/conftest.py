"""What several tests of publishing share: peers on the test's `channel`, which the test module has a fixture for."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest


@pytest.fixture
def start(channel: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts a peer with that verb; whatever still runs at the end is killed."""
    script = Path(__file__).with_name("publication_peer.py")
    with ExitStack() as stack:

        def start(verb: str) -> "subprocess.Popen[str]":
            command = [sys.executable, str(script), verb, str(channel)]
            peer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.enter_context(peer)
            stack.callback(peer.kill)
            return peer

        yield start
