"""`serve-weights`: lets engines on other machines fetch what is published on a channel of this one."""

import argparse
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fastdeploy_rl.cli.options import Verbs, add_channel, add_json, add_verb, port, print_fields, print_line
from fastdeploy_rl.errors import ConfigurationError

if TYPE_CHECKING:
    from fastdeploy_rl.transport.mooncake_engine import MooncakeSettings

_EXAMPLES = """\
  fastdeploy-rl serve-weights                        # to engines on this machine: serve --load-strategy rsync
  (umask 077; openssl rand -hex 32 > ~/weights.secret)
  fastdeploy-rl serve-weights --host 0.0.0.0 --port 8190 --secret-file ~/weights.secret

an engine on another machine, which has the same file:
  fastdeploy-rl serve --model DIR --load-strategy rsync \\
    --rsync-config '{"transport": "tcp", "address": "trainer:8190", "secret_file": "/root/weights.secret"}'

A trainer can do the same itself, with a WeightServer beside its WeightPublisher."""
_ENDS = (signal.SIGINT, signal.SIGTERM)


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "serve-weights", "serve a channel to engines elsewhere, until interrupted", _EXAMPLES)
    add_channel(parser)
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default 127.0.0.1: this machine alone); give a secret with any other",
    )
    parser.add_argument("--port", type=port, default=0, help="port to listen on (default: any that is free)")
    parser.add_argument(
        "--secret-file",
        type=Path,
        default=None,
        metavar="FILE",
        help="16 bytes or more, which both ends prove and neither sends; only its owner may read the file",
    )
    _add_mooncake(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def _add_mooncake(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Mooncake (engines with transport mooncake; needs the extra rdma)")
    group.add_argument(
        "--mooncake",
        choices=("tcp", "rdma"),
        default=None,
        help="let engines pull by Mooncake's TransferEngine as well; tcp listens on every interface, without a secret",
    )
    group.add_argument("--mooncake-device", metavar="NAMES", help="HCAs for rdma (default: all)")
    group.add_argument(
        "--mooncake-host", metavar="ADDRESS", help="this machine, as engines reach it (default 127.0.0.1)"
    )


def _mooncake(options: argparse.Namespace) -> "MooncakeSettings | None":
    from fastdeploy_rl.transport.mooncake_engine import MooncakeSettings

    named = {"device_name": options.mooncake_device, "local_hostname": options.mooncake_host}
    given = {name: value for name, value in named.items() if value is not None}
    if options.mooncake is not None:
        return MooncakeSettings(options.mooncake, **given)
    if given:
        raise ConfigurationError("--mooncake-device and --mooncake-host need --mooncake tcp or --mooncake rdma")
    return None


def run(options: argparse.Namespace) -> int:
    from fastdeploy_rl.publish.weight_server import WeightServer
    from fastdeploy_rl.transport.secret import read_secret

    secret = None if options.secret_file is None else read_secret(options.secret_file)
    server = WeightServer(
        options.ipc_dir, host=options.host, port=options.port, secret=secret, mooncake=_mooncake(options)
    )
    # Blocked from here on, in the server's threads too: then whenever one comes, the wait below ends, and nothing else.
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
    try:
        with server:
            _announce(server.address, server.channel.path, has_secret=secret is not None, as_json=options.json)
            signal.sigwait(_ENDS)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)
    if not options.json:
        print("stopped", flush=True)
    return 0


def _announce(address: str, channel: Path, *, has_secret: bool, as_json: bool) -> None:
    if as_json:
        print_line({"event": "serving", "address": address, "channel": str(channel), "has_secret": has_secret})
        return
    print(f"serving weights at {address}; Ctrl-C ends it")
    access = "who proves the secret" if has_secret else "whoever reaches the port"
    print_fields(channel=channel, readable_for=access)
    sys.stdout.flush()
