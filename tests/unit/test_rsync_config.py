"""`--rsync-config`: what is not in the schema is refused with its key, and what is comes as it was written."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_rl.errors import ConfigurationError
from fastdeploy_rl.sources.rsync_config import (
    MAX_BYTES,
    CheckpointTransferConfig,
    MooncakeConfig,
    TcpConfig,
    options,
    parse_rsync_config,
    stock_rsync_config,
)


@pytest.mark.parametrize("text", ["", "{}", '{"transport": "tcp"}'])
def test_nothing_said_is_tcp_to_the_server_of_this_machine(text: str) -> None:
    assert parse_rsync_config(text) == TcpConfig()
    assert (TcpConfig().num_streams, TcpConfig().bucket_bytes, TcpConfig().address) == (4, 16 << 20, "")


def test_every_key_is_taken_as_it_was_written() -> None:
    tcp = {
        "address": "trainer:9000",
        "peers": ["10.0.0.1:9100", "[fe80::1]:9100"],
        "serve": "0.0.0.0:9100",
        "num_streams": 64,
        "bucket_bytes": 1,
        "secret_file": "/run/secret",
    }
    assert parse_rsync_config(json.dumps(tcp)) == TcpConfig(**{**tcp, "peers": tuple(tcp["peers"])})
    mooncake = {"protocol": "rdma", "device_name": "mlx5_0,mlx5_1", "local_hostname": "10.0.0.7", "address": "a:1"}
    assert parse_rsync_config(json.dumps({"transport": "mooncake", **mooncake})) == MooncakeConfig(**mooncake)
    free = {"api": "stream", "config": {"rdma": {"gid": [1, 2]}, "": None}}
    assert parse_rsync_config(json.dumps({"transport": "checkpoint_transfer", **free})) == CheckpointTransferConfig(
        **free
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"stream": 2}', "unknown field `stream`; keys of tcp are address, peers, serve, .*, num_streams"),
        ('{"transport": "mooncake", "num_streams": 2}', "unknown field `num_streams`"),
        ('{"transport": "checkpoint_transfer", "address": "a:1"}', "unknown field `address`"),
        ('{"transport": "pigeon"}', "transports are tcp, mooncake, checkpoint_transfer"),
        ('{"transport": null}', "transports are tcp, mooncake, checkpoint_transfer"),
        ('{"num_streams": 0}', r"\$.num_streams"),
        ('{"num_streams": 65}', r"\$.num_streams"),
        ('{"num_streams": true}', r"\$.num_streams"),
        ('{"bucket_bytes": 0}', r"\$.bucket_bytes"),
        ('{"bucket_bytes": 1073741825}', r"\$.bucket_bytes"),
        ('{"transport": "mooncake", "protocol": "tpc"}', r"\$.protocol"),
        ('{"transport": "checkpoint_transfer", "api": ""}', r"\$.api"),
        ('{"peers": "a:1"}', r"\$.peers"),
        ('{"address": "trainer"}', "address: an address is host:port .* got 'trainer'"),
        ('{"address": "::1:9000"}', "address: .* got '::1:9000'"),
        ('{"peers": ["a:1", ""]}', r"peers\[1\]: .* got ''"),
        ('{"serve": "0.0.0.0:0"}', "serve: .* got '0.0.0.0:0'"),
        ('{"serve": "0.0.0.0:65536"}', "serve: .* got '0.0.0.0:65536'"),
        ('{"secret_file": "a\\nb"}', "secret_file: control characters"),
        ('{"transport": "mooncake", "device_name": "a\\u2028b"}', "device_name: control characters"),
        ("[]", "Expected `object`"),
        ("{", "truncated"),
        ("[" * 50_000, "Expected `object`"),
        ('{"a":' * 10_000, "--rsync-config"),
        (json.dumps({"peers": ["a:1"] * 257}), r"\$.peers"),
        (json.dumps({"address": "a" * 5000}), r"\$.address"),
        (" " * (MAX_BYTES + 1), "more than"),
        ("é" * (MAX_BYTES // 2 + 1), "more than"),
        ('{"address": "\udce9:1"}', "--rsync-config"),
    ],
)
def test_what_the_schema_does_not_allow_is_refused_and_the_key_named(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as caught:
        parse_rsync_config(text)
    assert str(caught.value).startswith("--rsync-config")
    assert len(str(caught.value)) < 1000


@given(st.text(max_size=60) | st.binary(max_size=40).map(lambda data: data.decode("latin-1")))
def test_any_text_is_a_config_or_a_configuration_error(text: str) -> None:
    try:
        parse_rsync_config(text)
    except ConfigurationError:
        return
    assert isinstance(json.loads(text or "{}"), dict)


def test_every_key_is_documented_with_its_default_and_bounds() -> None:
    listed = options()
    assert len({(option.transport, option.key) for option in listed}) == len(listed) == 6 + 8 + 2
    assert all(option.description for option in listed)
    by_key = {(option.transport, option.key): option for option in listed}
    assert by_key["tcp", "num_streams"][2:4] == ("4", "1 .. 64")
    assert by_key["mooncake", "protocol"][2:4] == ('"tcp"', "rdma, tcp")


# --- FastDeploy's own dictionary -------------------------------------------------------------------------


def test_a_dictionary_of_fastdeploys_is_what_its_package_is_made_with() -> None:
    """Its keys are the package's; only a transport, or nothing but keys of `tcp`, says that it is for us."""
    stock = {"etcd_endpoints": ["a:1"], "nested": {"device": "mlx5_0"}}
    config = parse_rsync_config(stock_rsync_config(stock))
    assert isinstance(config, CheckpointTransferConfig)
    assert config.config == stock
    assert parse_rsync_config(stock_rsync_config({})) == TcpConfig()
    assert parse_rsync_config(stock_rsync_config({"address": "h:1"})) == TcpConfig(address="h:1")
    ours = parse_rsync_config(stock_rsync_config({"transport": "mooncake", "device_name": "mlx5_0"}))
    assert ours == MooncakeConfig(device_name="mlx5_0")


def test_a_dictionary_that_is_no_json_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--rsync-config: "):
        stock_rsync_config({"key": object()})
