"""Three ranks on two hosts that share nothing but Paddle's TCPStore, over an hour apart on their clocks. One of them is
killed or stopped at every point of a command; judged by what each of them says it follows."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

HOST_PEER = Path(__file__).with_name("host_peer.py")
HOUR_NS = 3_600 * 10**9
QUESTIONS = ("install", "commit")
POINTS = [f"{question}.{point}" for question in QUESTIONS for point in ("called", "voted", "proposed", "decided")]


class Host:
    """A machine of its own: runtime directory, clock, ranks."""

    def __init__(self, port: int, directory: Path, clock: str, ahead_ns: int, ranks: list[int]) -> None:
        directory.mkdir()
        command = [sys.executable, HOST_PEER, port, clock, ahead_ns, *ranks]
        self._said: dict[str, Any] = {}
        self._process = subprocess.Popen(
            list(map(str, command)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=directory,
            env=os.environ | {"XDG_RUNTIME_DIR": str(directory), "GLOG_minloglevel": "2"},
        )

    def tell(self, do: str, **order: object) -> None:
        self._process.stdin.write(json.dumps({"do": do, **order}) + "\n")
        self._process.stdin.flush()

    def hear_until(self, word: str) -> list[dict[str, Any]]:
        """Every line up to the one with that word."""
        lines = []
        while not lines or word not in lines[-1]:
            line = self._process.stdout.readline()
            assert line, f"the host ended before it said {word!r}; so far: {lines}"
            lines.append(json.loads(line))
        return lines

    def close(self) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(20)


class Pair:
    """Both hosts, and the commands that they carry out."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.hosts = [Host(port, directory / "a", "a", 0, [0, 1]), Host(port, directory / "b", "b", HOUR_NS, [2])]
        for host in self.hosts:
            stack.callback(host.close)
        self.hosts[0].tell("serve")
        self.server = self.hosts[0].hear_until("server")[-1]["server"]
        self.ask("meet", "met")
        self._number = 0

    def ask(self, do: str, answer: str, **order: object) -> list[dict[str, Any]]:
        for host in self.hosts:
            host.tell(do, **order)
        return [line for host in self.hosts for line in host.hear_until(answer)]

    def begin(self, *, deadline_s: float = 5.0, plot: str = "orderly", **fault: object) -> None:
        self._number += 1
        for host in self.hosts:
            host.tell("command", number=self._number, deadline_s=deadline_s, plot=plot, **fault)

    def end(self) -> tuple[dict[int, dict[str, str]], set[int]]:
        """What each rank said, also one that stood still and went on later; and which ones stood still."""
        lines = [line for host in self.hosts for line in host.hear_until("over")]
        stopped = {rank for line in lines if "over" in line for rank in line["stopped"]}
        lines += self.ask("resume", "resumed")
        self.ask("back", "back")
        said: dict[int, dict[str, str]] = defaultdict(dict)
        for line in lines:
            if "rank" in line:
                said[line.pop("rank")] |= line
        return said, stopped


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(tmp_path_factory.mktemp("hosts"), stack)


def follow_one(said: dict[int, dict[str, str]], survivors: set[int]) -> dict[str, str]:
    """The decisions that all survivors follow, and whoever else got that far too."""
    agreed = said[min(survivors)]
    assert {rank: said[rank] for rank in survivors} == dict.fromkeys(survivors, agreed)
    assert all(words.items() <= agreed.items() for words in said.values())
    assert set(agreed.values()) <= {"YES", "NO"}
    assert ("commit" in agreed) == (agreed["install"] == "YES")
    return agreed


@pytest.mark.parametrize("plot", ["orderly", "race"])
def test_ranks_of_two_hosts_follow_one_decision(pair: Pair, plot: str) -> None:
    """An hour between their clocks: nobody's deadline is over at once, or later by that much."""
    for _ in range(5):
        pair.begin(plot=plot)
        agreed = follow_one(pair.end()[0], {0, 1, 2})
        assert plot == "race" or agreed == {"install": "YES", "commit": "YES"}


def test_a_deadline_passes_on_both_hosts(pair: Pair) -> None:
    """Rank 0 stands still before it decides: the others say NO by their own clocks, and it follows."""
    pair.begin(deadline_s=0.3, victim=0, point="install.voted", kind="stop")
    said, stopped = pair.end()
    assert stopped == {0}
    assert follow_one(said, {0, 1, 2}) == {"install": "NO"}


@pytest.mark.parametrize("victim", range(3))
@pytest.mark.parametrize("kind", ["kill", "stop"])
def test_one_rank_gone_at_any_point_leaves_one_decision(pair: Pair, victim: int, kind: str) -> None:
    """Whoever comes back from standing still follows it too."""
    for plot in ("orderly", "race"):
        for point in POINTS:
            pair.begin(plot=plot, victim=victim, point=point, kind=kind, deadline_s=0.3 if kind == "stop" else 5.0)
            said, stopped = pair.end()
            agreed = follow_one(said, {0, 1, 2} - {victim} if kind == "kill" else {0, 1, 2})
            expected = expected_decisions(plot, victim, point)
            assert expected.items() <= agreed.items(), (plot, point, said)
            assert stopped <= {victim}


def expected_decisions(plot: str, victim: int, point: str) -> dict[str, str]:
    """What must come of it. In a race it is open who is first, and whether the victim comes to its point at all."""
    question, place = point.split(".")
    if plot == "race":
        return {"install": "NO"} if point == "install.called" else {}
    before = {"install": "YES"} if question == "commit" else {}
    if place == "called" or (place == "voted" and victim == 0):
        return before | {question: "NO"}
    if place == "voted":
        return before  # rank 0 may count the vote before it hears of the death
    return before | {question: "YES"}


def test_ranks_on_both_hosts_hear_that_the_store_is_gone(tmp_path: Path) -> None:
    """Silent at first, then dead, while ranks 1 and 2 wait for a decision that is not taken: they say so long before
    the command's deadline, and follow nothing."""
    with ExitStack() as stack:
        pair = Pair(tmp_path, stack)
        assert said_without(pair, signal.SIGSTOP) == {1: "PeerLostError", 2: "PeerLostError"}
        os.kill(pair.server, signal.SIGCONT)
        pair.ask("end", "ended")
        assert said_without(pair, signal.SIGKILL) == {1: "PeerLostError", 2: "PeerLostError"}
        pair.ask("end", "ended")


def said_without(pair: Pair, number: signal.Signals) -> dict[int, str]:
    """The errors of a command whose store gets that signal on the way; KeyError where a rank follows something."""
    pair.begin(deadline_s=20.0, victim=0, point="install.voted", kind="stop")
    pair.hosts[0].hear_until("standing")
    os.kill(pair.server, number)
    lines = [line for host in pair.hosts for line in host.hear_until("over")]
    return {line["rank"]: line["error"] for line in lines if "rank" in line}
