"""The parent of an engine's workers: starts them, serves HTTP for them, and ends with them.

Owns the board, the collectives' segment, the HTTP socket and, through WorkerSet, the workers. Refuses to know weights
and models beyond what can be checked before a process is started. Invariant: when `serve` returns, however it came to
that, no worker runs and no segment of this engine is left.
"""

import asyncio
import logging
import math
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import uvicorn

from fastdeploy_rl._native import CollectiveGroup
from fastdeploy_rl.board.board import HISTORY, Board, Leftovers
from fastdeploy_rl.board.layout import MAX_RANKS
from fastdeploy_rl.config import AUTO, KEEP, REBUILD, RESTART, Deadlines, child_environ, num_copy_threads
from fastdeploy_rl.control.async_board import AsyncBoardEngine
from fastdeploy_rl.control.completions import CompletionService
from fastdeploy_rl.control.generation import GenerationDefaults
from fastdeploy_rl.control.http_address import HttpAccess, http_access, write_http_address
from fastdeploy_rl.control.http_app import EngineFace, make_app
from fastdeploy_rl.control.metrics import EngineMetrics
from fastdeploy_rl.control.weights_service import WeightsService
from fastdeploy_rl.coverage import Coverage
from fastdeploy_rl.dtypes import itemsize
from fastdeploy_rl.engines.embedded.checkpoint import Checkpoint
from fastdeploy_rl.engines.embedded.engine_client import EngineClient, WorkerLink
from fastdeploy_rl.engines.embedded.generation_config import read_generation_defaults
from fastdeploy_rl.engines.embedded.messages import SLOT_BYTES, Ready, Tokens, WorkerConfig
from fastdeploy_rl.engines.embedded.model_config import ModelConfig, parameter_specs
from fastdeploy_rl.engines.embedded.page_allocator import PAGE_TOKENS, default_num_pages
from fastdeploy_rl.engines.embedded.restart_budget import MAX_DEATHS, RestartBudget
from fastdeploy_rl.engines.embedded.tokenizer import Tokenizer
from fastdeploy_rl.engines.embedded.worker_process import WORKER_MODULE
from fastdeploy_rl.engines.embedded.worker_set import WorkerSet
from fastdeploy_rl.errors import (
    ConfigurationError,
    DeadlineExceededError,
    FastDeployRLError,
    PeerLostError,
)
from fastdeploy_rl.memory.private_directory import check_private_directory
from fastdeploy_rl.memory.shared_segment import SharedSegment, unlink_segment
from fastdeploy_rl.report import EngineStatus, HistoryEntry, UpdateReport
from fastdeploy_rl.sources.described import check_not_open_to_all
from fastdeploy_rl.sources.registry import IPC_SNAPSHOT, takes_newest_at_start
from fastdeploy_rl.update.client import BoardClient
from fastdeploy_rl.update.history import read_history
from fastdeploy_rl.update.rank_files import RankFiles

_log = logging.getLogger(__name__)

STOPPING = "the engine is stopping"
DEFAULT_MAX_MODEL_LEN = 2048
"""Tokens a request, where neither the operator nor the model says less."""


@dataclass(frozen=True)
class ServeConfig:
    """What `fastdeploy-rl serve` was asked for. `max_waiting`: requests beyond the `max_num_seqs` that run; more are
    told to come back. `uses_generation_config`: the model's own generation_config.json is the default for sampling.
    `max_staleness`: of a request that names none (control/generation.py). `api_keys`: any of them opens the HTTP
    routes; none leaves them open. `on_worker_death`: one of config.ON_WORKER_DEATH; `max_deaths` are got over in a
    short time (restart_budget.py)."""

    model_dir: Path
    num_ranks: int
    channel: Path
    load_strategy: str = "ipc"
    rsync_config: str = ""
    has_checksums: bool = True
    apply_mode: str = AUTO
    rollback: str = KEEP
    kv_policy: str = REBUILD
    has_prefix_cache: bool = True
    max_staleness: int | None = None
    on_worker_death: str = RESTART
    max_deaths: int = MAX_DEATHS
    host: str = "127.0.0.1"
    port: int = 8180
    board_port: int = 8182
    max_num_seqs: int = 8
    max_model_len: int | None = None
    max_waiting: int = 512
    uses_generation_config: bool = True
    log_dir: Path = Path("log")
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    deadlines: Deadlines = field(default_factory=Deadlines)
    worker_module: str = WORKER_MODULE

    @property
    def is_restarted_on_death(self) -> bool:
        """A worker that dies is started again."""
        return self.on_worker_death == RESTART

    @property
    def num_threads(self) -> int:
        """Of one worker's matrix products: more than its share of the cores would only make ranks wait for each
        other."""
        return max(1, len(os.sched_getaffinity(0)) // self.num_ranks)

    @property
    def http_access(self) -> HttpAccess:
        """Who may use the HTTP routes."""
        return http_access(self.host, has_keys=bool(self.api_keys))


@dataclass(frozen=True)
class CheckedModel:
    """What is known of the model before any process is started."""

    config: ModelConfig
    tokenizer: Tokenizer
    max_model_len: int
    name: str
    defaults: GenerationDefaults

    def weight_bytes(self, num_ranks: int) -> int:
        """Of one rank, in float32; a tied head is counted once."""
        own = [spec for spec in parameter_specs(self.config, num_ranks) if spec.coverage is Coverage.UPDATED]
        return sum(math.prod(spec.local_shape(num_ranks)) * itemsize(spec.dtype) for spec in own)

    def kv_cache_bytes(self, num_ranks: int, max_num_seqs: int) -> int:
        """Of one rank when every page is in use, in float32."""
        config = self.config
        tokens = default_num_pages(self.max_model_len, max_num_seqs) * PAGE_TOKENS
        heads = config.num_key_value_heads // num_ranks
        return config.num_hidden_layers * 2 * heads * tokens * config.head_dim * itemsize("F32")


class StartVersion(NamedTuple):
    """What an engine comes up on: a version as text, empty for the weights of the model's own directory, and then why
    not on a newer one (empty where none is looked for)."""

    version: str = ""
    reason: str = ""


class Announcer(Protocol):
    """Who tells the operator."""

    def starting(self, config: ServeConfig, model: CheckedModel, reclaimed: Leftovers | None) -> None:
        """All checks passed; workers are being started. `reclaimed`: what a dead engine had left at this port."""
        ...

    def ready(self, ranks: Sequence[Ready], seconds: float, start: "StartVersion") -> None:
        """It serves."""
        ...

    def rank_lost(self, rank: int, reason: str) -> None:
        """A worker died and is being started again; meanwhile requests are refused."""
        ...

    def rank_back(self, ready: Ready) -> None:
        """It is back; the engine serves when all ranks hold the committed version again."""
        ...


def check_model(config: ServeConfig) -> CheckedModel:
    """ConfigurationError or CheckpointError for a model that cannot be served like this."""
    with Checkpoint.open(config.model_dir) as checkpoint:
        model = checkpoint.config
    if not 1 <= config.num_ranks <= MAX_RANKS:
        raise ConfigurationError(f"tensor parallel size must be 1 to {MAX_RANKS}, got {config.num_ranks}")
    model.check_divides(config.num_ranks)
    longest = model.max_position_embeddings
    max_model_len = config.max_model_len or min(longest, DEFAULT_MAX_MODEL_LEN)
    if max_model_len > longest:
        raise ConfigurationError(f"--max-model-len {max_model_len}: the model has positions for {longest} tokens")
    defaults = read_generation_defaults(config.model_dir) if config.uses_generation_config else GenerationDefaults()
    tokenizer = Tokenizer.open(config.model_dir)
    return CheckedModel(model, tokenizer, max_model_len, config.model_dir.resolve().name, defaults)


def check_channel(channel: Path, load_strategy: str) -> None:
    """ConfigurationError for a channel that trainers could not use either; one that is not there yet is fine. Files may
    also lie where others read them: what the package itself puts there has private directories of its own."""
    try:
        if load_strategy == IPC_SNAPSHOT and channel.exists():
            check_not_open_to_all(channel, ())
        else:
            check_private_directory(channel)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigurationError(f"channel {channel}: {error.strerror}; name another directory (--ipc-dir)") from error


def _make_log_dir(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"logs cannot go to {path}: {error.strerror}; choose another --log-dir") from error


def serve(config: ServeConfig, announcer: Announcer) -> None:
    """Runs an engine until SIGINT, SIGTERM or SIGHUP; main thread only.

    The errors of the tree: ConfigurationError and its like before anything was started, a worker's own error when it
    could not start, PeerLostError when one died."""
    asyncio.run(_Engine(config, announcer).run())


class _Engine:
    """One run, from the checks to the last worker's end."""

    def __init__(self, config: ServeConfig, announcer: Announcer) -> None:
        self._config = config
        self._announcer = announcer
        self._begun = time.monotonic()
        self._is_over = asyncio.Event()
        self._is_ready = asyncio.Event()
        self._fault: Exception | None = None
        self._workers: WorkerSet | None = None
        self._client: EngineClient | None = None

    async def run(self) -> None:
        async with AsyncExitStack() as stack:
            stack.enter_context(_signals(self._on_signal))
            model = check_model(self._config)
            check_channel(self._config.channel, self._config.load_strategy)
            _make_log_dir(self._config.log_dir)
            listener = stack.enter_context(bind(self._config.host, self._config.port))
            history = self._config.log_dir / HISTORY
            board = Board.create(self._config.board_port, num_ranks=self._config.num_ranks, history=history)
            stack.callback(board.close)
            write_http_address(board.run_dir, self._config.host, self._config.port, self._config.http_access)
            segment = stack.enter_context(_collectives_segment(self._config))
            self._announcer.starting(self._config, model, board.reclaimed)
            workers = await stack.enter_async_context(self._running_workers(model, board, segment))
            if takes_newest_at_start(self._config.load_strategy) and self._client is not None:
                self._client.suspend("the engine is starting, and takes the newest version over first")
            await stack.enter_async_context(self._serving(model, board, listener))
            await self._live(workers, board)
        if self._fault is not None:
            raise self._fault

    async def _live(self, workers: WorkerSet, board: Board) -> None:
        """Until a signal or a fault."""
        begun = time.monotonic()
        await _first(self._is_ready, self._is_over, timeout_s=self._config.deadlines.attach_s)
        if self._is_over.is_set():
            return
        if not self._is_ready.is_set():
            hint = f"see {self._config.log_dir}/workerlog.RANK"
            late = workers.late_ranks
            self.fail(DeadlineExceededError.waiting_for("start of the engine", since_s=begun, missing=late, hint=hint))
            return
        start = StartVersion()
        if takes_newest_at_start(self._config.load_strategy) and self._client is not None:
            start = await self._come_up(board.port)
            if self._is_over.is_set():
                return
            self._client.resume(workers.leader_link)
        self._announcer.ready(workers.ready, time.monotonic() - self._begun, start)
        await self._is_over.wait()

    async def _come_up(self, port: int) -> StartVersion:
        """On the newest version; given up when the engine ends."""
        deadline_s = self._config.deadlines.update_s
        taking = asyncio.create_task(_take_newest(port, deadline_s))
        over = asyncio.create_task(self._is_over.wait())
        allowed_s = deadline_s + self._config.deadlines.outcome_s
        await asyncio.wait([taking, over], timeout=allowed_s, return_when=asyncio.FIRST_COMPLETED)
        over.cancel()
        taking.cancel()
        with suppress(asyncio.CancelledError):
            return await taking
        return StartVersion(reason=f"no newer version was there after {allowed_s:g} s")

    def _on_signal(self) -> None:
        """The first stops the engine in order, a second one at once."""
        if self._workers is not None:
            self._workers.is_hurried = self._is_over.is_set()
        self._is_over.set()

    def fail(self, error: Exception) -> None:
        """The first fault is the reason; what comes after follows from it."""
        if not self._is_over.is_set():
            self._fault = error
            _log.error("fault=%s reason=%s", type(error).__name__, error)
            self._is_over.set()

    # --- workers ----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _running_workers(self, model: CheckedModel, board: Board, segment: str) -> AsyncIterator[WorkerSet]:
        config = self._config
        self._workers = workers = WorkerSet(
            self._worker_config(model, segment),
            self,
            board,
            RestartBudget(config.max_deaths) if config.is_restarted_on_death else None,
            log_dir=config.log_dir,
            environ=worker_environ(config.num_threads),
            module=config.worker_module,
        )
        async with workers.running():
            self._client = EngineClient(
                workers.leader_link,
                max_model_len=model.max_model_len,
                vocab_size=model.config.vocab_size,
                max_requests=config.max_num_seqs + config.max_waiting,
            )
            try:
                yield workers
            finally:
                self._is_over.set()

    def _worker_config(self, model: CheckedModel, segment: str) -> WorkerConfig:
        """Of any rank."""
        config = self._config
        return WorkerConfig(
            rank=0,
            num_ranks=config.num_ranks,
            model_dir=str(config.model_dir),
            board_port=config.board_port,
            load_strategy=config.load_strategy,
            rsync_config=config.rsync_config,
            has_checksums=config.has_checksums,
            channel=str(config.channel),
            apply_mode=config.apply_mode,
            rollback=config.rollback,
            kv_policy=config.kv_policy,
            has_prefix_cache=config.has_prefix_cache,
            max_num_seqs=config.max_num_seqs,
            max_model_len=model.max_model_len,
            collectives_segment=segment,
            num_copy_threads=max(1, num_copy_threads() // config.num_ranks),
            parent_pid=os.getpid(),
            socket_fd=-1,
            is_restarted_on_death=config.is_restarted_on_death,
            deadlines=config.deadlines,
        )

    def deliver(self, tokens: Tokens) -> None:
        if self._client is not None:
            self._client.deliver(tokens)

    def all_ready(self) -> None:
        self._is_ready.set()

    def rank_lost(self, rank: int, reason: str) -> None:
        if rank == 0 and self._client is not None:
            self._client.suspend(f"{reason}; it is started again: ask again in a moment")
        self._announcer.rank_lost(rank, reason)

    def rank_back(self, ready: Ready, link: WorkerLink) -> None:
        if ready.rank == 0 and self._client is not None:
            self._client.resume(link)
        self._announcer.rank_back(ready)

    # --- HTTP -------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _serving(self, model: CheckedModel, board: Board, listener: socket.socket) -> AsyncIterator[None]:
        if self._client is None:
            raise PeerLostError("no worker to serve for")
        metrics = EngineMetrics()
        weights = WeightsService(_EngineBoard(board), has_checksums=self._config.has_checksums)
        defaults = msgspec.structs.replace(model.defaults, max_staleness=self._config.max_staleness)
        completions = CompletionService(self._client, model.tokenizer, metrics, model.name, defaults)
        face = EngineFace(completions, weights, metrics)
        server = _Server(
            uvicorn.Config(
                make_app(face, self._config.api_keys, self._config.deadlines),
                lifespan="off",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=math.ceil(self._config.deadlines.http_drain_s),
            )
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        serving.add_done_callback(lambda task: self.fail(PeerLostError("the HTTP server ended")))
        try:
            yield
        finally:
            self._is_over.set()
            self._client.fail_all(STOPPING)
            server.should_exit = True
            await self._await_http_end(serving)
            weights.close()

    async def _await_http_end(self, serving: "asyncio.Task[None]") -> None:
        """Raises what ended the server, if anything did."""
        deadlines = self._config.deadlines
        ended, _ = await asyncio.wait([serving], timeout=deadlines.http_drain_s + deadlines.let_go_s)
        serving.cancel()
        for task in ended:
            task.result()


async def _take_newest(port: int, deadline_s: float) -> StartVersion:
    """Nothing to be had is no fault: a trainer may come later. Nor is what cannot be taken: the engine has weights. But
    why it is on those is told."""
    try:
        async with AsyncBoardEngine(port) as engine:
            version = (await engine.update(deadline_s=deadline_s)).version
    except FastDeployRLError as error:
        _log.warning("event=started_on_checkpoint reason=%r", str(error))
        return StartVersion(reason=str(error))
    _log.info("event=started_on version=%s", version)
    return StartVersion(version)


class _EngineBoard:
    """The engine's own board as the HTTP side reads it."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._files = RankFiles(board.run_dir)

    def status(self) -> EngineStatus:
        return self._board.status()

    def read_report(self, command: int) -> UpdateReport:
        return self._files.read_report(command)

    def read_history(self, limit: int) -> list[HistoryEntry]:
        return read_history(self._board.run_dir / HISTORY, limit)

    def open_client(self) -> BoardClient:
        """One of its own for each command: a client waits for one thing at a time."""
        return BoardClient(self._board.port)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: signals belong to the supervisor."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. ConfigurationError for a port in use or an address that is none of this machine's."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigurationError(
            f"--host {host}: {error.strerror or error}; give an address of this machine"
        ) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
        return listener
    except OSError as error:
        listener.close()
        raise ConfigurationError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another --port"
        ) from error


def worker_environ(num_threads: int) -> dict[str, str]:
    """A worker's environment: as many compute threads as its share of the cores, that spin no longer than they must."""
    threads = str(num_threads)
    return child_environ(
        {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": threads,
            # A forward pass is hundreds of short parallel regions: threads that sleep at once after each make it twice
            # as slow; those that spin for long take cores from whoever stages the next weights.
            "KMP_BLOCKTIME": "1",
            "PYTHONUNBUFFERED": "1",
        }
    )


@contextmanager
def _signals(handler: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for kind in kinds:
        loop.add_signal_handler(kind, handler)
    try:
        yield
    finally:
        for kind in kinds:
            loop.remove_signal_handler(kind)


@contextmanager
def _collectives_segment(config: ServeConfig) -> Iterator[str]:
    """Its name; the segment is there, zeroed. The board's owner lock makes us the only user of this port's names."""
    name = f"fastdeploy_rl_collectives.{config.board_port}"
    unlink_segment(name)
    segment = SharedSegment.create(name, CollectiveGroup.required_bytes(config.num_ranks, SLOT_BYTES))
    segment.close()
    try:
        yield name
    finally:
        unlink_segment(name)


async def _first(*events: asyncio.Event, timeout_s: float) -> None:
    """Until one of the events is set or the time is over."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
