"""No wait without a deadline: over the syntax trees, so that none can come back; and what a deadline's error says.

Refused is each call that may block for as long as somebody else likes, where it is written without a time. What stands
in SPOKEN may: each with the reason why it ends. The native core's waits take a deadline by their signature."""

import ast
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import fastdeploy_rl
from fastdeploy_rl import config
from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.errors import ConfigurationError, DeadlineExceededError, from_wire

ROOT = Path(fastdeploy_rl.__file__).parent
TIMED = re.compile(r"timeout|deadline|_s$|_ns$")
"""Names of keyword arguments that bound a wait."""

BARE = ("wait", "join", "result", "get", "acquire", "communicate", "poll", "recv", "accept", "exception", "shutdown")
"""Methods that wait without an end where they get no argument at all."""
ALWAYS = ("recv", "recv_into", "recvfrom", "recvmsg", "sendall", "waitpid", "lockf", "connect", "as_completed")
ALWAYS_DOTTED = ("asyncio.gather", "asyncio.shield", "request.receive")
"""That bring their own end only by what stands around them: each must be spoken for."""
KEYWORD = {
    "subprocess.run": "timeout",
    "subprocess.call": "timeout",
    "subprocess.check_call": "timeout",
    "subprocess.check_output": "timeout",
    "asyncio.wait": "timeout",
    "socket.create_connection": "timeout",
    "urllib.request.urlopen": "timeout",
}
POSITIONAL = {"asyncio.wait_for": 2, "select.select": 4}
LOCKS = ("Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "Barrier")
SLEEPS = ("time.sleep", "asyncio.sleep")

HELD_BRIEFLY = "held for a few statements, never across a wait"
IN_A_LOOP = "one turn of a loop that looks at its deadline"
NEVER_WAITS = "only looks: it answers at once"
ENDED = "of a task or future that has ended"
OWNER_LOCK = "an OwnerLock gives up after Deadlines.lock_s"
SOCKET_TIME = "the kernel keeps its time: SO_SNDTIMEO or SO_RCVTIMEO, set just before"
AWAITED_IN_TIME = "held briefly; whoever waits for its news does so with a deadline"
LIFE = "a watch that lasts as long as what it watches: the wait is what this process is for"
SPOKEN = {
    ("board/board.py", "lock.acquire()"): OWNER_LOCK,
    ("board/board.py", "threading.Lock()"): HELD_BRIEFLY,
    ("board/rendezvous.py", "threading.Lock()"): HELD_BRIEFLY,
    ("board/store_rendezvous.py", "threading.Lock()"): HELD_BRIEFLY,
    ("board/store_rendezvous.py", "time.sleep(min(POLL_S, remaining_s))"): IN_A_LOOP,
    ("cli/snapshot.py", "time.sleep(_LOOK_EVERY_S)"): "--follow: as long as its user lets it",
    (
        "update/pace.py",
        "time.sleep(min(self._worked_s * _REST, left_s))",
    ): "as long as a piece of work before it, in the command's time",
    ("engines/fastdeploy/cache_transfer.py", "time.sleep(_LOOK_NS / 1000000000.0)"): IN_A_LOOP,
    ("engines/fastdeploy/engine_hooks.py", "time.sleep(_LOOK_S)"): IN_A_LOOP,
    ("engines/fastdeploy/attendance.py", "time.sleep(_SHOWN_S)"): "for a moment, which is what it is for",
    ("engines/fastdeploy/seat.py", "time.sleep(_LOOK_AGAIN_S)"): IN_A_LOOP,
    ("engines/fastdeploy/seat.py", "asked.result()"): ENDED,
    ("engines/fastdeploy/seat.py", "self._manager.poll()"): NEVER_WAITS,
    ("engines/fastdeploy/weight_manager.py", "time.sleep(_LOOK_AGAIN_S)"): "as long as a trainer has weights cleared",
    ("sources/ipc_or_metas.py", "threading.Lock()"): HELD_BRIEFLY,
    ("publish/fastdeploy_compat.py", "time.sleep(_LOOK_S)"): IN_A_LOOP,
    ("publish/snapshot_writer.py", "self._lock.acquire()"): OWNER_LOCK,
    ("publish/snapshot_writer.py", "threading.Condition()"): AWAITED_IN_TIME,
    ("engines/embedded/graph_pool.py", "threading.Lock()"): HELD_BRIEFLY,
    ("memory/paddle_view.py", "threading.Lock()"): HELD_BRIEFLY,
    ("sources/checkpoint_transfer.py", "threading.Lock()"): "held for a few statements, or waited for with a time",
    ("sources/described.py", "threading.Lock()"): "held while files are read, and waited for with a time",
    ("sources/fetching.py", "threading.Lock()"): HELD_BRIEFLY,
    ("update/participant.py", "threading.Lock()"): HELD_BRIEFLY,
    ("sources/held_versions.py", "threading.Lock()"): HELD_BRIEFLY,
    ("sources/ipc_snapshot.py", "threading.Lock()"): "held while a directory is looked at, never while bytes are read",
    ("testing/fake_mooncake.py", "threading.Lock()"): HELD_BRIEFLY,
    ("testing/fake_mooncake.py", "network.wait()"): "as long as a test says, as the library's calls do",
    ("testing/fake_mooncake.py", "self._passes.wait()"): "as long as a test says, as the library's calls do",
    ("testing/fake_mooncake.py", "self._thread.join()"): "it looks every millisecond whether it is to end",
    ("transport/checkpoint_transfer.py", "self._thread.join()"): "it has said its last word",
    ("transport/files.py", "threading.Lock()"): HELD_BRIEFLY,
    ("transport/checkpoint_transfer.py", "threading.Lock()"): "held while one tensor is copied, never across a wait",
    ("cli/chat.py", "input('> ')"): "a person at a terminal has all the time there is",
    ("collectives/paddle.py", "threading.Lock()"): HELD_BRIEFLY,
    ("collectives/paddle.py", "probe.connect((host, port))"): "a socket with the time that is left",
    ("collectives/paddle.py", "time.sleep(min(_TRY_AGAIN_S, remaining_s))"): IN_A_LOOP,
    ("control/async_board.py", "answer.exception()"): ENDED,
    ("control/async_board.py", "answer.result()"): ENDED,
    ("control/async_board.py", "asyncio.wait([answer])"): "the client in the thread keeps to the deadline of its call",
    ("control/weights_service.py", "answer.exception()"): ENDED,
    ("control/completion_routes.py", "request.receive()"): "beside an answer, until its client has it or is gone",
    (
        "control/weights_service.py",
        "asyncio.shield(answer)",
    ): "the client in the thread keeps to its command's deadline",
    ("control/weights_service.py", "await command"): "one of its own commands, each with its deadline",
    ("control/weights_service.py", "threading.Lock()"): HELD_BRIEFLY,
    (
        "engines/embedded/engine_client.py",
        "self._news.wait()",
    ): "OpenAI's requests have no deadline: this one ends with "
    "its client, with its engine, or when a command aborts it",
    ("engines/embedded/loop.py", "self._manager.poll()"): NEVER_WAITS,
    ("engines/embedded/messages.py", "self._socket.recv(_READ_BYTES)"): "a socket that does not block",
    ("engines/embedded/supervisor.py", "await taking"): "it is done, or cancelled: then it ends within let_go_s",
    ("engines/embedded/supervisor.py", "event.wait()"): "a task, and asyncio.wait around it has the deadline",
    ("engines/embedded/supervisor.py", "self._is_over.wait()"): LIFE,
    ("engines/embedded/supervisor.py", "task.result()"): ENDED,
    ("engines/embedded/worker.py", "poller.poll()"): LIFE,
    ("engines/embedded/worker_set.py", "await listening"): ENDED,
    ("engines/embedded/worker_set.py", "await readable"): LIFE,
    ("engines/embedded/worker_set.py", "task.exception()"): ENDED,
    ("engines/embedded/worker_set.py", "asyncio.sleep(_CONDEMNED_PERIOD_S)"): LIFE,
    ("engines/embedded/worker_process.py", "self._child.poll()"): NEVER_WAITS,
    ("engines/numpy/worker.py", "self._manager.poll()"): NEVER_WAITS,
    ("testing/faulty_worker.py", "time.sleep(linger_s)"): "as long as a test says",
    ("engines/numpy/worker.py", "time.sleep(float(question.removeprefix('busy ')))"): "as long as a test says",
    ("manager.py", "self._lock.acquire()"): OWNER_LOCK,
    ("memory/owner_lock.py", "self.acquire()"): OWNER_LOCK,
    ("memory/owner_lock.py", "time.sleep(_SWEEP_POLL_S)"): IN_A_LOOP,
    ("publish/leases.py", "self._lock.acquire()"): OWNER_LOCK,
    ("publish/weight_server.py", "threading.Lock()"): "held while segments are mapped, never across a wait",
    ("testing/faulty_source.py", "threading.Lock()"): HELD_BRIEFLY,
    ("transport/connection.py", "link.connect(place, deadline_ns)"): SOCKET_TIME,
    ("transport/connection.py", "threading.Lock()"): HELD_BRIEFLY,
    ("transport/link.py", "self._socket.connect(place)"): SOCKET_TIME,
    ("transport/link.py", "self._socket.recv_into(target, len(target), socket.MSG_WAITALL)"): SOCKET_TIME,
    ("transport/link.py", "threading.Lock()"): HELD_BRIEFLY,
    ("transport/files.py", "future.exception()"): ENDED,
    ("transport/files.py", "future.result()"): ENDED,
    ("transport/mooncake.py", "threading.Condition()"): AWAITED_IN_TIME,
    ("transport/mooncake.py", "threading.Lock()"): HELD_BRIEFLY,
    ("transport/mooncake_engine.py", "threading.Lock()"): HELD_BRIEFLY,
    (
        "transport/mooncake_exporter.py",
        "threading.Lock()",
    ): "held while memory is registered, which takes no peer",
    ("transport/peers.py", "threading.Lock()"): HELD_BRIEFLY,
    ("transport/tcp_fetch.py", "threading.Condition()"): AWAITED_IN_TIME,
    ("transport/tcp_server.py", "listener.accept()"): "as long as the server lives; its close ends it",
    ("transport/tcp_server.py", "threading.Lock()"): "held briefly, or for one answer, which has a deadline",
    ("update/client.py", "threading.Lock()"): HELD_BRIEFLY,
    ("update/engine_state.py", "threading.RLock()"): HELD_BRIEFLY,
    ("update/history.py", "time.sleep(_LOOK_AGAIN_S)"): IN_A_LOOP,
}
"""(file, source of the call or of what is awaited) -> why it ends."""


def source_files() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def dotted(node: ast.AST) -> str:
    """`a.b.c`; what is no plain name becomes a point."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def is_timed(call: ast.Call) -> bool:
    return any(keyword.arg is None or TIMED.search(keyword.arg) for keyword in call.keywords)


def is_endless(call: ast.Call) -> bool:
    """May this call, as it is written, block without an end?"""
    name = dotted(call.func)
    method = name.rpartition(".")[2]
    if name in KEYWORD:
        return KEYWORD[name] not in {keyword.arg for keyword in call.keywords}
    if name in POSITIONAL:
        return len(call.args) < POSITIONAL[name] and not is_timed(call)
    if name in SLEEPS or name in ALWAYS_DOTTED or name == "input":
        return True
    if name == "fcntl.flock":
        return "LOCK_NB" not in ast.unparse(call)
    if name == "select.poll":
        return False  # makes one; its method waits
    if method in LOCKS and name.partition(".")[0] in ("threading", "asyncio", "multiprocessing"):
        return True
    if not isinstance(call.func, ast.Attribute):
        return False
    return method in ALWAYS or (method in BARE and not call.args and not call.keywords)


def endless_waits(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and source of each, awaited names included: `await task` has no deadline, `await wait(task)` may have."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and is_endless(node):
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Await) and not isinstance(node.value, ast.Call):
            yield node.lineno, f"await {ast.unparse(node.value)}"


def found() -> dict[tuple[str, str], int]:
    return {
        (path.relative_to(ROOT).as_posix(), text): line
        for path in source_files()
        for line, text in endless_waits(ast.parse(path.read_text()))
    }


def test_no_wait_is_without_a_deadline() -> None:
    unspoken = {place: line for place, line in found().items() if place not in SPOKEN}
    assert [f"{file}:{line}: {text}" for (file, text), line in unspoken.items()] == []


def test_no_exception_outlives_its_wait() -> None:
    waits = found()
    assert [place for place in SPOKEN if place not in waits] == []


@pytest.mark.parametrize(
    "line",
    [
        "thread.join()",
        "event.wait()",
        "await event.wait()",
        "queue.get()",
        "future.result()",
        "lock.acquire()",
        "child.wait()",
        "child.communicate()",
        "poller.poll()",
        "select.select([fd], [], [])",
        "subprocess.run(['true'], check=True)",
        "await asyncio.wait(tasks)",
        "await asyncio.wait_for(task)",
        "await task",
        "await self._task",
        "fcntl.flock(fd, fcntl.LOCK_EX)",
        "os.waitpid(pid, 0)",
        "connection.recv(10)",
        "time.sleep(1)",
        "self._lock = threading.Lock()",
        "input()",
    ],
)
def test_an_endless_wait_is_seen(line: str) -> None:
    body = line if "await" not in line else f"async def f():\n    {line}"
    assert list(endless_waits(ast.parse(body)))


@pytest.mark.parametrize(
    "line",
    [
        "thread.join(5)",
        "event.wait(timeout=5)",
        "queue.get(timeout=left_s)",
        "names.get('a')",
        "', '.join(names)",
        "select.select([fd], [], [], 0)",
        "subprocess.run(['true'], timeout=5)",
        "await asyncio.wait(tasks, timeout=5)",
        "await asyncio.wait_for(task, 5)",
        "fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)",
    ],
)
def test_a_wait_with_a_deadline_passes(line: str) -> None:
    body = line if "await" not in line else f"async def f():\n    {line}"
    assert not list(endless_waits(ast.parse(body)))


# --- one place -----------------------------------------------------------------------------------


def test_every_default_of_a_deadline_stands_in_the_configuration() -> None:
    """Elsewhere a module's constant that bounds a wait is made from Deadlines; periods are called otherwise."""
    constant = re.compile(r"^_?[A-Z_]*(DEADLINE|TIMEOUT|GRACE)[A-Z_]* *(:[^=]*)?= *[\d._]+", re.MULTILINE)
    elsewhere = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in source_files()
        if path != ROOT / "config.py" and path.parent.name != "testing"
        for match in constant.finditer(path.read_text())
    ]
    assert elsewhere == []


def test_no_parameter_has_a_deadline_of_its_own_by_default() -> None:
    """A default is one of Deadlines, or None."""
    bounded = re.compile(r"(deadline|timeout)\w*$")
    defaults: list[str] = []
    for path in source_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                given = node.args
                positional = [*given.posonlyargs, *given.args]
                pairs = [
                    *zip(positional[len(positional) - len(given.defaults) :], given.defaults, strict=True),
                    *zip(given.kwonlyargs, given.kw_defaults, strict=True),
                ]
                defaults += [
                    f"{path.relative_to(ROOT)}: {node.name}({name.arg}={ast.unparse(default)})"
                    for name, default in pairs
                    if default is not None and bounded.search(name.arg) and _is_number(default)
                ]
    assert defaults == []


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float))


def test_every_deadline_says_what_it_is_for() -> None:
    fields = ast.parse(Path(config.__file__).read_text())
    (deadlines,) = (node for node in fields.body if isinstance(node, ast.ClassDef) and node.name == "Deadlines")
    for field, text in zip(deadlines.body[1:], deadlines.body[2:], strict=False):
        if isinstance(field, ast.AnnAssign):
            assert isinstance(text, ast.Expr), f"{ast.unparse(field)} has no docstring"


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 1e9, "5", True, None])
def test_a_deadline_that_cannot_be_is_refused_by_name(seconds: object) -> None:
    for name in vars(Deadlines()):
        with pytest.raises(ConfigurationError, match=name):
            Deadlines(**{name: seconds})


def test_waits_end_in_the_order_in_which_they_stand_around_each_other() -> None:
    """Whoever waits for somebody who waits gives him the time to say why it failed."""
    deadlines = Deadlines()
    assert deadlines.finish_s < deadlines.outcome_s < deadlines.http_s


# --- what the error says -------------------------------------------------------------------------


def test_a_deadlines_error_names_what_whom_and_since_when() -> None:
    begun = time.monotonic() - 3.0
    error = DeadlineExceededError.waiting_for("votes of update 7", since_s=begun, missing={2, 1}, hint="update again")
    since = r"\(since \d\d:\d\d:\d\d\)"
    assert re.fullmatch(
        rf"no votes of update 7 after 3\.\d s {since}; ranks \[1, 2\] missing; update again", str(error)
    )
    assert re.fullmatch(
        rf"no board after 3\.\d s {since}", str(DeadlineExceededError.waiting_for("board", since_s=begun))
    )


def test_it_arrives_elsewhere_as_it_was() -> None:
    error = DeadlineExceededError.waiting_for("board", since_s=time.monotonic())
    assert repr(from_wire("DeadlineExceededError", str(error))) == repr(error)
