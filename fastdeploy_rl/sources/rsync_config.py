"""What `--rsync-config` may say: a JSON object that chooses how bytes travel, strict and bounded.

Owns the schema, its defaults, and what is refused. Refuses to know sockets: no name is looked up and no file opened.
Invariant: the addresses of a config that came out of `parse_rsync_config` name a host and a port.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, get_args

import msgspec
from msgspec import Meta

from fastdeploy_rl.errors import ConfigurationError
from fastdeploy_rl.transport.address import parse_address
from fastdeploy_rl.transport.tcp import DEFAULT_BUCKET_BYTES, DEFAULT_STREAMS, MAX_BUCKET_BYTES, MAX_STREAMS

MAX_BYTES = 64 << 10
"""Of the JSON text."""
_MAX_PEERS = 256
_MAX_TEXT = 4096
# What would make one line of a message or a log two.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")

_Text = Annotated[str, Meta(max_length=_MAX_TEXT)]
_Address = Annotated[
    _Text,
    Meta(
        description="`host:port` (`[::1]:port`) of the server that the trainer runs. Empty: the one that the "
        "channel on this machine names."
    ),
]
_Peers = Annotated[
    tuple[_Text, ...],
    Meta(
        max_length=_MAX_PEERS,
        description="`serve` addresses of other engines, which are asked for bytes before the trainer's server is.",
    ),
]
_Serve = Annotated[
    _Text,
    Meta(
        description="`host:port` where this engine serves its version to others; rank r listens on port + r. Empty: it "
        "serves nobody."
    ),
]
_BucketBytes = Annotated[
    int, Meta(ge=1, le=MAX_BUCKET_BYTES, description="How many bytes are asked for at once. No result depends on it.")
]
_SecretFile = Annotated[
    _Text,
    Meta(description="File with the secret that servers and clients share. Empty: whoever connects is served."),
]


class FetchConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="transport"):
    """What every transport has that fetches from a weight server and from peers."""

    address: _Address = ""
    peers: _Peers = ()
    serve: _Serve = ""
    bucket_bytes: _BucketBytes = DEFAULT_BUCKET_BYTES
    secret_file: _SecretFile = ""


class TcpConfig(FetchConfig, frozen=True, kw_only=True, tag="tcp"):
    """A binary protocol over TCP that needs nothing installed; the default."""

    num_streams: Annotated[
        int, Meta(ge=1, le=MAX_STREAMS, description="Connections that a rank fetches over at a time.")
    ] = DEFAULT_STREAMS


class MooncakeConfig(FetchConfig, frozen=True, kw_only=True, tag="mooncake"):
    """Mooncake's TransferEngine moves the bytes; versions are agreed on over the `tcp` protocol."""

    protocol: Annotated[
        Literal["tcp", "rdma"],
        Meta(description="`rdma` needs an HCA, and is refused without one: Mooncake would fall back to TCP silently."),
    ] = "tcp"
    device_name: Annotated[
        _Text, Meta(description="HCAs for `rdma`, separated by commas. Empty: Mooncake chooses.")
    ] = ""
    local_hostname: Annotated[_Text, Meta(description="This machine's address, as the servers reach it.")] = "127.0.0.1"


class CheckpointTransferConfig(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="transport",
    tag="checkpoint_transfer",
):
    """FastDeploy's closed package of that name, where it is installed."""

    api: Annotated[
        Literal["auto", "downloader", "stream"],
        Meta(
            description="`downloader`: `core.RDMAWeightsDownloader`; `stream`: `CheckpointTransfer.receive_stream`; "
            "`auto`: whichever the package has."
        ),
    ] = "auto"
    config: Annotated[dict[str, Any], Meta(description="What the package is given, as it is.")] = {}


RsyncConfig: TypeAlias = TcpConfig | MooncakeConfig | CheckpointTransferConfig
_KINDS = get_args(RsyncConfig)


def parse_rsync_config(text: str) -> RsyncConfig:
    """Empty text is an empty object: `tcp` with its defaults. ConfigurationError, naming the key, for what the schema
    does not allow."""
    if len(text) > MAX_BYTES or len(text.encode("utf-8", "replace")) > MAX_BYTES:
        raise ConfigurationError(f"--rsync-config has more than {MAX_BYTES} bytes")
    try:
        given = {"transport": "tcp"} | msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ConfigurationError(f"--rsync-config: {error!s:.500}") from error
    try:
        config: RsyncConfig = msgspec.convert(given, RsyncConfig)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ConfigurationError(f"--rsync-config: {error!s:.500}{_known(given['transport'], str(error))}") from error
    if isinstance(config, FetchConfig):
        _check_texts(config)
    return config


def stock_rsync_config(given: Mapping[str, Any]) -> str:
    """The config that a dictionary of FastDeploy's `--rsync-config` means, as text for `parse_rsync_config`: ours where
    it names a transport, or has keys of `tcp` alone; else FastDeploy's own, which is what `CheckpointTransfer` is made
    with. ConfigurationError for what is no JSON."""
    is_ours = "transport" in given or given.keys() <= set(TcpConfig.__struct_fields__)
    config = dict(given) if is_ours else {"transport": "checkpoint_transfer", "config": dict(given)}
    try:
        return msgspec.json.encode(config).decode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"--rsync-config: {error!s:.500}") from error


def _check_texts(config: FetchConfig) -> None:
    named = [(key, text) for key, text in (("address", config.address), ("serve", config.serve)) if text]
    named += [(f"peers[{number}]", peer) for number, peer in enumerate(config.peers)]
    for key, text in named:
        try:
            parse_address(text)
        except ConfigurationError as error:
            raise ConfigurationError(f"--rsync-config: {key}: {error}") from error
    for key, text in (("secret_file", config.secret_file), *_texts(config)):
        if _CONTROL.search(text):
            raise ConfigurationError(f"--rsync-config: {key}: control characters are not allowed")


def _texts(config: FetchConfig) -> list[tuple[str, str]]:
    if isinstance(config, MooncakeConfig):
        return [("device_name", config.device_name), ("local_hostname", config.local_hostname)]
    return []


def _known(transport: Any, error: str) -> str:
    """What could have been said, where a transport or a key is none that there is."""
    keys = {kind.__struct_config__.tag: kind.__struct_fields__ for kind in _KINDS}
    if "$.transport" in error:
        return f"; transports are {', '.join(map(str, keys))}"
    return f"; keys of {transport} are {', '.join(keys[transport])}" if "unknown field" in error else ""


class Option(NamedTuple):
    """A key of the config, as the documentation lists it. `default` is JSON; `bounds` "" where there are none."""

    transport: str
    key: str
    default: str
    bounds: str
    description: str


def options() -> tuple[Option, ...]:
    """Every key of every transport, in the order of the schema."""
    return tuple(option for kind in _KINDS for option in _options_of(kind))


def _options_of(kind: type[msgspec.Struct]) -> list[Option]:
    schema = msgspec.json.schema(kind)["$defs"][kind.__name__]["properties"]
    tag = schema.pop("transport")["enum"][0]
    return [
        Option(tag, key, msgspec.json.encode(field["default"]).decode(), _bounds(field), field["description"])
        for key, field in schema.items()
    ]


def _bounds(field: dict[str, Any]) -> str:
    if "enum" in field:
        return ", ".join(field["enum"])
    if "minimum" in field:
        return f"{field['minimum']} .. {field['maximum']}"
    return f"at most {field['maxItems']}" if "maxItems" in field else ""
