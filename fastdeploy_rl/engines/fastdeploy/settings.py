"""What a FastDeploy worker is told about its weights: fields of FastDeploy's configuration, and the plugin's options.

Owns the options' schema (the key "fastdeploy_rl" of `--rsync-config`), their defaults and bounds, and which ranks are
one engine. Refuses to know models and memory. Invariant: settings that came out of `EngineSettings.of` are of a rank
that exists, and name a load strategy that we have.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from fastdeploy_rl.board.layout import MAX_RANKS
from fastdeploy_rl.config import AUTO, KEEP, MAX_COPY_THREADS, REBUILD, Deadlines, default_channel
from fastdeploy_rl.errors import ConfigurationError
from fastdeploy_rl.manager import ManagerConfig
from fastdeploy_rl.sources.registry import RSYNC, check_load_strategy
from fastdeploy_rl.sources.rsync_config import stock_rsync_config

OPTIONS_KEY = "fastdeploy_rl"
MTP = "mtp"
"""The namespace of a multi-token-prediction model beside the main one."""
_MAX_PATTERNS = 64
_MAX_TEXT = 4096

_Text = Annotated[str, Meta(max_length=_MAX_TEXT)]
_Seconds = Annotated[float, Meta(gt=0, le=86400)]


class PluginOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The object under OPTIONS_KEY; every key may be left out."""

    channel: Annotated[
        _Text,
        Meta(
            description="Directory in which a trainer publishes with this package. Empty: the user's default channel."
        ),
    ] = ""
    metas_dir: Annotated[
        _Text,
        Meta(description="Where FastDeploy's trainers leave `ipc_metas_{gpu}` and snapshots to share. Empty: nowhere."),
    ] = "/shared_ipc_meta"
    apply_mode: Annotated[_Text, Meta(description="`auto`, `alias`, `alias-strict` or `copy`.")] = AUTO
    rollback: Annotated[_Text, Meta(description="`keep`, `refetch` or `off`.")] = KEEP
    kv_policy: Annotated[
        _Text, Meta(description="`rebuild` or `keep`: what an update over the board does to the KV cache.")
    ] = REBUILD
    update_s: Annotated[_Seconds, Meta(description="Seconds that an update or a wakeup may take.")] = 300.0
    clear_s: Annotated[_Seconds, Meta(description="Seconds that a clear or a sleep may take.")] = 60.0
    attach_s: Annotated[_Seconds, Meta(description="Seconds until all ranks have built their models.")] = 600.0
    copy_threads: Annotated[int, Meta(ge=1, le=MAX_COPY_THREADS, description="Threads of one rank's copies.")] = 2
    checksums: Annotated[bool, Meta(description="False: nothing is proved, and there is no receipt.")] = True
    frozen: Annotated[
        tuple[_Text, ...], Meta(max_length=1, description='`["mtp"]`: no update brings tensors of the MTP model.')
    ] = ()
    rank_local: Annotated[
        tuple[_Text, ...],
        Meta(
            max_length=_MAX_PATTERNS,
            description="Patterns (`*` and `?`) of parameters of which each rank has its own, neither a share nor a "
            "copy of a whole.",
        ),
    ] = ()
    history: Annotated[
        _Text, Meta(description="File that keeps the history of updates. Empty: it goes with the engine.")
    ] = ""


class Option(NamedTuple):
    """As the documentation lists it; `default` is JSON."""

    key: str
    default: str
    description: str


def options() -> tuple[Option, ...]:
    """Every option of the plugin, in the order of the schema."""
    schema = msgspec.json.schema(PluginOptions)["$defs"][PluginOptions.__name__]["properties"]
    return tuple(
        Option(key, msgspec.json.encode(field["default"]).decode(), field["description"])
        for key, field in schema.items()
    )


@dataclass(frozen=True)
class EngineSettings:
    """One rank of a FastDeploy engine. `port` names the board: FastDeploy's local_engine_worker_queue_port of the
    engine's first ranks; `own_port` that of this rank's, which differs under expert parallelism alone. `rsync_config`:
    JSON text for our `rsync`, empty for another strategy."""

    port: int
    own_port: int
    rank: int
    num_ranks: int
    tp_rank: int
    load_strategy: str
    model_dir: Path
    channel: Path
    metas_dir: Path | None
    options: PluginOptions
    rsync_config: str
    is_expert_parallel: bool

    @classmethod
    def of(cls, fd_config: Any, local_rank: int) -> "EngineSettings":
        """From FastDeploy's FDConfig; releases before 2.5 lack some of its fields. ConfigurationError, naming field or
        option, for what cannot be."""
        parallel, load = fd_config.parallel_config, fd_config.load_config
        check_load_strategy(load.load_strategy)
        given = _object(getattr(load, "rsync_config", None))
        options = _parsed(given.pop(OPTIONS_KEY, {}))
        ports = _ports(parallel)
        is_expert_parallel = bool(parallel.enable_expert_parallel) and int(parallel.expert_parallel_size) > 1
        rank, num_ranks = int(parallel.tensor_parallel_rank), int(parallel.tensor_parallel_size)
        local_port = getattr(parallel, "local_engine_worker_queue_port", None)
        port = own_port = int(ports[0] if local_port is None else local_port)
        if is_expert_parallel:
            rank, num_ranks, port = int(parallel.expert_parallel_rank), int(parallel.expert_parallel_size), ports[0]
        if int(getattr(fd_config, "nnode", 1) or 1) > 1 or num_ranks > MAX_RANKS:
            raise ConfigurationError(
                f"an engine of {num_ranks} ranks on {getattr(fd_config, 'nnode', 1)} machines: the plugin keeps up to "
                f"{MAX_RANKS} ranks on one machine together"
            )
        if not 0 <= rank < num_ranks:
            raise ConfigurationError(f"rank {rank} of {num_ranks} (local rank {local_rank}) does not exist")
        return cls(
            port=port,
            own_port=own_port,
            rank=rank,
            num_ranks=num_ranks,
            tp_rank=int(parallel.tensor_parallel_rank),
            load_strategy=load.load_strategy,
            model_dir=Path(fd_config.model_config.model),
            channel=Path(options.channel) if options.channel else default_channel(),
            metas_dir=Path(options.metas_dir) if options.metas_dir else None,
            options=options,
            rsync_config=stock_rsync_config(given) if load.load_strategy == RSYNC else "",
            is_expert_parallel=is_expert_parallel,
        )

    @property
    def deadlines(self) -> Deadlines:
        options = self.options
        return replace(
            Deadlines(),
            update_s=options.update_s,
            clear_s=options.clear_s,
            pause_s=options.clear_s,
            attach_s=options.attach_s,
        )

    @property
    def manager_config(self) -> ManagerConfig:
        options = self.options
        return ManagerConfig(
            load_strategy=self.load_strategy,
            apply_mode=options.apply_mode,
            deadlines=self.deadlines,
            num_copy_threads=options.copy_threads,
            num_staging_threads=max(1, options.copy_threads // 2),
            rollback=options.rollback,
            kv_policy=options.kv_policy,
            has_checksums=options.checksums,
        )

    @property
    def history(self) -> Path | None:
        return Path(self.options.history) if self.options.history else None


def _parsed(given: object) -> PluginOptions:
    try:
        options = msgspec.convert(given, PluginOptions)
    except msgspec.ValidationError as error:
        known = ", ".join(PluginOptions.__struct_fields__)
        raise ConfigurationError(f"--rsync-config, {OPTIONS_KEY}: {error!s:.500}; options are {known}") from error
    if set(options.frozen) - {MTP}:
        raise ConfigurationError(f"--rsync-config, {OPTIONS_KEY}: frozen may name {MTP!r} alone")
    return options


def _object(given: object) -> dict[str, Any]:
    """ConfigurationError for what is no JSON object."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise ConfigurationError(f"--rsync-config is no JSON object: {given!r:.200}")
    return dict(given)


def _ports(parallel: Any) -> list[int]:
    """Of every data-parallel engine of this machine, in order."""
    given = parallel.engine_worker_queue_port
    texts = given.split(",") if isinstance(given, str) else given if isinstance(given, (list, tuple)) else [given]
    try:
        return [int(text) for text in texts]
    except (TypeError, ValueError):
        raise ConfigurationError(f"engine_worker_queue_port names no ports: {given!r:.200}") from None
