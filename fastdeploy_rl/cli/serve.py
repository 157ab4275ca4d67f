"""`serve`: runs the embedded engine until it is interrupted."""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fastdeploy_rl.cli.options import (
    DEFAULT_ENGINE,
    DEFAULT_HTTP_PORT,
    Verbs,
    add_channel,
    add_json,
    add_verb,
    api_key,
    api_keys_in,
    not_negative,
    port,
    positive,
    print_fields,
    print_line,
    seconds,
)
from fastdeploy_rl.config import (
    APPLY_MODES,
    AUTO,
    KEEP,
    KV_POLICIES,
    ON_WORKER_DEATH,
    REBUILD,
    RESTART,
    ROLLBACKS,
    Deadlines,
    check_checksums,
)
from fastdeploy_rl.observe.sizes import size_text

if TYPE_CHECKING:
    from fastdeploy_rl.board.board import Leftovers
    from fastdeploy_rl.engines.embedded.messages import Ready
    from fastdeploy_rl.engines.embedded.supervisor import CheckedModel, ServeConfig, StartVersion

_log = logging.getLogger(__name__)

_EXAMPLES = """\
  fastdeploy-rl serve --model ~/models/SmolLM2-135M-Instruct --tensor-parallel-size 3 --load-strategy ipc
  fastdeploy-rl serve --model DIR --tensor-parallel-size 1 --load-strategy ipc --ipc-dir /dev/shm/weights --port 9000"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "serve", "run the embedded engine and take over what trainers publish", _EXAMPLES)
    parser.add_argument(
        "--model",
        type=Path,
        required=True,
        metavar="DIR",
        help="Hugging Face directory of a Llama, Qwen2 or Qwen3 model",
    )
    parser.add_argument(
        "--tensor-parallel-size", type=positive, default=1, metavar="N", help="worker processes (default 1)"
    )
    parser.add_argument(
        "--load-strategy",
        default="ipc",
        metavar="NAME",
        help="how new weights get here: ipc (default, shared memory), ipc_snapshot (files), rsync (a server)",
    )
    parser.add_argument(
        "--rsync-config",
        default="",
        metavar="JSON",
        help='for rsync: how bytes travel, such as \'{"transport": "tcp", "address": "trainer:8190"}\' '
        "(default: tcp from the server that the channel names)",
    )
    parser.add_argument(
        "--no-checksums",
        action="store_true",
        help="read nothing that need not be copied: quicker, but nothing is proved and there is no receipt",
    )
    parser.add_argument(
        "--dynamic-load-weight",
        action="store_true",
        help="accepted for FastDeploy's sake: weights are always live here",
    )
    add_channel(parser)
    parser.add_argument(
        "--apply-mode",
        choices=APPLY_MODES,
        default=AUTO,
        help="use published memory in place (alias), and refuse where that cannot be (alias-strict), copy into the "
        "parameters' own memory (copy), or what is expected to stall decoding least (auto, the default)",
    )
    parser.add_argument(
        "--rollback",
        choices=ROLLBACKS,
        default=KEEP,
        help="the way back from a copy into live parameters: keep the old bytes (default), fetch them from the channel "
        "again, or have none (off)",
    )
    parser.add_argument(
        "--kv-on-update",
        choices=KV_POLICIES,
        default=REBUILD,
        help="what an update does to the KV cache that says nothing about it: drop it, so that requests in flight "
        "compute theirs anew with the new weights (rebuild, the default), or let them go on with what they have (keep)",
    )
    parser.add_argument(
        "--max-staleness",
        type=not_negative,
        default=None,
        metavar="N",
        help="refuse requests while the live version is more than N steps behind the newest published one (default: "
        "never)",
    )
    parser.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="requests that begin alike share KV of the same weights (the default)",
    )
    parser.add_argument(
        "--on-worker-death",
        choices=ON_WORKER_DEATH,
        default=RESTART,
        help="start the worker again, back to the committed version (restart, the default), or end the engine (stop)",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="HTTP address (default 127.0.0.1: this machine alone); give a key with any other",
    )
    parser.add_argument("--port", type=port, default=DEFAULT_HTTP_PORT, help=f"HTTP port (default {DEFAULT_HTTP_PORT})")
    parser.add_argument(
        "--engine-worker-queue-port",
        type=port,
        default=port(DEFAULT_ENGINE),
        metavar="PORT",
        help=f"number in the names of board and status words (default {DEFAULT_ENGINE})",
    )
    parser.add_argument(
        "--update-deadline",
        type=seconds,
        default=Deadlines.update_s,
        metavar="SECONDS",
        help="an update that nobody gave a deadline, as one by the status word, is undone after this long "
        f"(default {Deadlines.update_s:g})",
    )
    parser.add_argument(
        "--max-num-seqs", type=positive, default=8, metavar="N", help="requests that run at once (default 8)"
    )
    parser.add_argument(
        "--max-model-len",
        type=positive,
        default=None,
        metavar="N",
        help="tokens of prompt and completion together (default 2048, or what the model can if that is less)",
    )
    parser.add_argument(
        "--max-waiting",
        type=positive,
        default=512,
        metavar="N",
        help="requests that may wait besides those that run; more get 429 and come back later (default 512)",
    )
    parser.add_argument(
        "--generation-config",
        choices=("auto", "none"),
        default="auto",
        help="sampling where a request is silent: as the model's generation_config.json says (auto, the default), or "
        "OpenAI's defaults (none)",
    )
    parser.add_argument(
        "--log-dir",
        type=Path,
        default=Path("log"),
        metavar="DIR",
        help="for serverlog and workerlog.RANK (default ./log)",
    )
    parser.add_argument(
        "--api-key",
        type=api_key,
        action="append",
        metavar="KEY",
        help="answer only to who sends it (Authorization: Bearer KEY), except /health and /metrics; may be repeated; "
        "shows in process lists, so rather set FASTDEPLOY_RL_API_KEY (or FastDeploy's FD_API_KEY) to KEY,KEY",
    )
    parser.add_argument("--api-key-file", type=api_keys_in, metavar="FILE", help="the same from a file, one key a line")
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from fastdeploy_rl.config import api_keys, default_channel
    from fastdeploy_rl.sources.registry import RSYNC, check_load_strategy
    from fastdeploy_rl.sources.rsync import check_rsync_config
    from fastdeploy_rl.sources.rsync_config import parse_rsync_config

    check_load_strategy(options.load_strategy)
    (check_rsync_config if options.load_strategy == RSYNC else parse_rsync_config)(options.rsync_config)
    check_checksums(options.apply_mode, not options.no_checksums)
    # uvicorn, the tokenizer and the rest take a moment; a wrong strategy does not have to wait for them.
    from fastdeploy_rl.engines.embedded.supervisor import ServeConfig, serve

    config = ServeConfig(
        model_dir=options.model,
        num_ranks=options.tensor_parallel_size,
        channel=(options.ipc_dir or default_channel()).absolute(),
        load_strategy=options.load_strategy,
        rsync_config=options.rsync_config,
        has_checksums=not options.no_checksums,
        apply_mode=options.apply_mode,
        rollback=options.rollback,
        kv_policy=options.kv_on_update,
        has_prefix_cache=options.enable_prefix_caching,
        max_staleness=options.max_staleness,
        on_worker_death=options.on_worker_death,
        host=options.host,
        port=options.port,
        board_port=options.engine_worker_queue_port,
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len,
        max_waiting=options.max_waiting,
        uses_generation_config=options.generation_config == "auto",
        log_dir=options.log_dir,
        deadlines=Deadlines(update_s=options.update_deadline),
        api_keys=(*(options.api_key or ()), *(options.api_key_file or ())) or api_keys(),
    )
    # Until the log file is there, nothing that is logged belongs on the operator's terminal.
    logging.getLogger("fastdeploy_rl").addHandler(logging.NullHandler())
    serve(config, _JsonAnnouncer() if options.json else _TextAnnouncer(config.board_port))
    if not options.json:
        print("stopped", flush=True)
    return 0


_ACCESS_TEXTS = {"loopback": "for this machine alone", "key": "with an API key", "open": "open to all who reach it"}
_OPEN_WARNING = (
    "--host {host} without an API key: whoever reaches port {port} may generate, update and clear; set "
    "FASTDEPLOY_RL_API_KEY or --api-key-file, or leave --host at 127.0.0.1"
)


class StartSummary(msgspec.Struct, frozen=True):
    """What is being started, in the order in which it is shown. Sizes in bytes, those of weights and KV cache for one
    rank; `reclaimed` says what a dead engine had left at this port; `http_access` who may use the routes: "loopback",
    "key" or "open"."""

    model: str
    model_size: str
    ranks: int
    threads_per_rank: int
    load_strategy: str
    apply_mode: str
    rollback: str
    on_worker_death: str
    channel: str
    url: str
    http_access: str
    port: int
    max_num_seqs: int
    max_model_len: int
    weight_bytes: int
    kv_cache_bytes: int
    shm_free_bytes: int
    log_dir: str
    reclaimed: str


def summarize(config: "ServeConfig", model: "CheckedModel", reclaimed: "Leftovers | None") -> StartSummary:
    """Of an engine whose workers are about to be started."""
    from fastdeploy_rl.control.http_address import http_url
    from fastdeploy_rl.memory.shared_segment import free_bytes

    size = model.config
    return StartSummary(
        model=str(config.model_dir),
        model_size=f"{size.num_hidden_layers} layers, {size.hidden_size} wide, vocabulary {size.vocab_size}",
        ranks=config.num_ranks,
        threads_per_rank=config.num_threads,
        load_strategy=config.load_strategy,
        apply_mode=config.apply_mode,
        rollback=config.rollback,
        on_worker_death=config.on_worker_death,
        channel=str(config.channel),
        url=http_url(config.host, config.port),
        http_access=config.http_access.value,
        port=config.board_port,
        max_num_seqs=config.max_num_seqs,
        max_model_len=model.max_model_len,
        weight_bytes=model.weight_bytes(config.num_ranks),
        kv_cache_bytes=model.kv_cache_bytes(config.num_ranks, config.max_num_seqs),
        shm_free_bytes=free_bytes(),
        log_dir=str(config.log_dir),
        reclaimed=str(reclaimed or ""),
    )


def summary_lines(summary: StartSummary) -> dict[str, object]:
    """For people: few lines that belong together."""
    return {
        "model": f"{summary.model} ({summary.model_size})",
        "ranks": f"{summary.ranks}, {summary.threads_per_rank} compute threads each; "
        f"on a worker's death: {summary.on_worker_death}",
        "load_strategy": f"{summary.load_strategy}, apply mode {summary.apply_mode}, rollback {summary.rollback}",
        "channel": summary.channel,
        "http": f"{summary.url}, {_ACCESS_TEXTS[summary.http_access]}",
        "engine_worker_queue_port": summary.port,
        "requests": f"{summary.max_num_seqs} at once, {summary.max_model_len} tokens each",
        "memory_a_rank": f"{size_text(summary.weight_bytes)} of weights, up to {size_text(summary.kv_cache_bytes)} of "
        "KV cache",
        "/dev/shm": f"{size_text(summary.shm_free_bytes)} free",
        "logs": f"{summary.log_dir}/serverlog, workerlog.RANK",
        "reclaimed": summary.reclaimed,
    }


def log_line(summary: StartSummary) -> str:
    """The same as one line of `key=value`."""
    return "event=starting " + " ".join(f"{key}={value!r}" for key, value in msgspec.structs.asdict(summary).items())


def _begin_log(config: "ServeConfig", summary: StartSummary) -> None:
    """An engine that anybody may command is said to be one in the log and on the terminal."""
    _log_to_file(config.log_dir)
    _log.info("%s", log_line(summary))
    if summary.http_access == "open":
        warning = _OPEN_WARNING.format(host=config.host, port=config.port)
        _log.warning("event=open_http %s", warning)
        print(f"fastdeploy-rl: warning: {warning}", file=sys.stderr, flush=True)


def _log_to_file(log_dir: Path) -> None:
    """The terminal is for the operator: what the server logs stands beside the workers' logs."""
    logging.basicConfig(
        level=logging.INFO,
        filename=log_dir / "serverlog",
        filemode="w",
        format="ts=%(asctime)s.%(msecs)03d level=%(levelname)s logger=%(name)s %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
    )


class _TextAnnouncer:
    """For people."""

    def __init__(self, port: int) -> None:
        self._chat = "fastdeploy-rl chat" + ("" if str(port) == DEFAULT_ENGINE else f" --engine {port}")

    def starting(self, config: "ServeConfig", model: "CheckedModel", reclaimed: "Leftovers | None") -> None:
        summary = summarize(config, model, reclaimed)
        _begin_log(config, summary)
        print("fastdeploy-rl serve")
        print_fields(**summary_lines(summary))
        print("starting", flush=True)

    def ready(self, ranks: "Sequence[Ready]", seconds: float, start: "StartVersion") -> None:
        weights = " + ".join(size_text(rank.weight_bytes) for rank in ranks)
        if start.reason:
            print(f"on the weights of the model's directory: {start.reason}", flush=True)
        weights += f", version {start.version}" if start.version else ""
        print(f"ready in {seconds:.1f} s: weights {weights}; talk to it: {self._chat}", flush=True)

    def rank_lost(self, rank: int, reason: str) -> None:
        print(f"lost {reason}; starting rank {rank} again", flush=True)

    def rank_back(self, ready: "Ready") -> None:
        print(f"rank {ready.rank} is back after {ready.seconds:.1f} s", flush=True)


class _JsonAnnouncer:
    """For programs: one document a line."""

    def starting(self, config: "ServeConfig", model: "CheckedModel", reclaimed: "Leftovers | None") -> None:
        summary = summarize(config, model, reclaimed)
        _begin_log(config, summary)
        print_line({"event": "starting", **msgspec.structs.asdict(summary)})

    def ready(self, ranks: "Sequence[Ready]", seconds: float, start: "StartVersion") -> None:
        weight_bytes = [rank.weight_bytes for rank in ranks]
        print_line({"event": "ready", "weight_bytes": weight_bytes, "seconds": seconds, **start._asdict()})

    def rank_lost(self, rank: int, reason: str) -> None:
        print_line({"event": "rank_lost", "rank": rank, "reason": reason})

    def rank_back(self, ready: "Ready") -> None:
        print_line({"event": "rank_back", "rank": ready.rank, "seconds": ready.seconds})
