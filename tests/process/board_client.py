"""A client of a board as a process of its own: `python board_client.py PORT VERB ...`. Speaks in lines.

ask NAME N             N updates one after another to versions that nobody else asks for; each must answer its own
stop POINT SEQUENCE    goes up to POINT (claimed, submitted or finished) with one request, says so, and stays there
"""

import signal
import sys
from functools import partial

from fastdeploy_rl.testing import Sequencer
from fastdeploy_rl.update.client import BoardClient


def ask(client: BoardClient, name: str, times: str) -> None:
    for number in range(int(times)):
        version = f"{name}.{number}"
        report = client.update(version, deadline_s=60)
        if report.version != version:
            raise SystemExit(f"{version} got the outcome of {report.version}")
    print("ok", flush=True)


def stop(client: BoardClient, point: str, sequence: str) -> None:
    order = Sequencer.attach(sequence)
    reached = partial(stay, order, point)
    claim, wait = client._claim, client._await_outcome
    if point == "claimed":
        client._claim = lambda *arguments: reached(claim(*arguments))
    elif point == "submitted":
        client._await_outcome = lambda *arguments: reached(None)
    else:
        client._await_outcome = lambda *arguments: reached(wait(*arguments))
    print(client.update("1.1", deadline_s=60).version, flush=True)


def stay(order: Sequencer, point: str, result: object) -> object:
    order.reach(point)
    signal.sigwait([signal.SIGUSR1])
    return result


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    with BoardClient(int(sys.argv[1])) as client:
        {"ask": ask, "stop": stop}[sys.argv[2]](client, *sys.argv[3:])
