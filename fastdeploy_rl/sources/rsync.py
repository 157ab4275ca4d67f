"""Load strategy `rsync`: weights that are fetched from a server, over the transport that `--rsync-config` names.

Owns what that config means: which transport, which servers, which secret. Refuses to know how bytes travel and when
they are fetched. Invariant: nothing is connected and nothing listens before a version is asked for; the address of a
server that the config does not name is read anew each time, since a trainer that starts again has another one.
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fastdeploy_rl.publish.weight_server import read_server_address
from fastdeploy_rl.sources.base import SourceConfig, WeightSource
from fastdeploy_rl.sources.fetching import FetchingSource
from fastdeploy_rl.sources.rsync_config import (
    CheckpointTransferConfig,
    FetchConfig,
    MooncakeConfig,
    TcpConfig,
    parse_rsync_config,
)
from fastdeploy_rl.sources.served_versions import ServedVersions
from fastdeploy_rl.transport.base import Transport
from fastdeploy_rl.transport.connection import Server
from fastdeploy_rl.transport.peers import PeerEngine, PeerTransport
from fastdeploy_rl.transport.secret import read_secret
from fastdeploy_rl.transport.tcp import DEFAULT_STREAMS, TcpTransport
from fastdeploy_rl.transport.tcp_peers import TcpPeer, peer_engine

if TYPE_CHECKING:
    from fastdeploy_rl.transport.mooncake_engine import MooncakeSettings


def check_rsync_config(text: str) -> None:
    """ConfigurationError for what `create` would refuse on this machine, as far as that is known without a rank: the
    config itself, its secret, its HCAs."""
    chosen = parse_rsync_config(text)
    if isinstance(chosen, FetchConfig) and chosen.secret_file:
        read_secret(Path(chosen.secret_file))
    if isinstance(chosen, MooncakeConfig):
        _mooncake_settings(chosen).check()


def create(config: SourceConfig) -> WeightSource:
    """ConfigurationError for a config that is wrong, a secret that cannot be read, or a package that is missing."""
    chosen = parse_rsync_config(config.rsync_config)
    if isinstance(chosen, CheckpointTransferConfig):
        from fastdeploy_rl.sources.checkpoint_transfer import CheckpointTransferSource

        return CheckpointTransferSource(config, chosen)
    secret = read_secret(Path(chosen.secret_file)) if chosen.secret_file else None
    transport = _transport(chosen, _publisher(chosen, config), secret)
    if chosen.peers:
        transport = PeerTransport(transport, _peer_engines(chosen, config.rank, secret), config.rank)
    return FetchingSource(transport, config, _holder(chosen, config, secret))


def _publisher(chosen: FetchConfig, config: SourceConfig) -> Server:
    return chosen.address or partial(read_server_address, config.channel)


def _transport(chosen: TcpConfig | MooncakeConfig, publisher: Server, secret: bytes | None) -> Transport:
    if isinstance(chosen, MooncakeConfig):
        return _mooncake(chosen, publisher, secret)
    return TcpTransport(publisher, secret=secret, num_streams=chosen.num_streams, bucket_bytes=chosen.bucket_bytes)


def _peer_engines(chosen: FetchConfig, rank: int, secret: bytes | None) -> list[PeerEngine]:
    """What peers have lies in memory of their own, so it comes over tcp whatever the publisher's transport is."""
    num_streams = chosen.num_streams if isinstance(chosen, TcpConfig) else DEFAULT_STREAMS
    connect = partial(TcpPeer, secret=secret, num_streams=num_streams, bucket_bytes=chosen.bucket_bytes)
    return [peer_engine(address, rank, connect) for address in chosen.peers]


def _holder(chosen: FetchConfig, config: SourceConfig, secret: bytes | None) -> ServedVersions | None:
    return ServedVersions(chosen.serve, config.rank, config.num_ranks, secret) if chosen.serve else None


def _mooncake(chosen: MooncakeConfig, publisher: Server, secret: bytes | None) -> Transport:
    from fastdeploy_rl.transport.mooncake import MooncakeTransport

    settings = _mooncake_settings(chosen)
    return MooncakeTransport.open(publisher, settings, secret=secret, bucket_bytes=chosen.bucket_bytes)


def _mooncake_settings(chosen: MooncakeConfig) -> "MooncakeSettings":
    from fastdeploy_rl.transport.mooncake_engine import MooncakeSettings

    return MooncakeSettings(chosen.protocol, chosen.device_name, chosen.local_hostname)
