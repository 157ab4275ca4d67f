"""`retire`: takes away what was published on a channel."""

import argparse

from fastdeploy_rl.cli.options import Verbs, add_channel, add_json, add_verb, megabytes, print_json

_EXAMPLES = """\
  fastdeploy-rl retire
  fastdeploy-rl retire --ipc-dir /run/user/1000/weights"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(
        verbs, "retire", "remove a publication and its shared memory; engines that hold it keep it", _EXAMPLES
    )
    add_channel(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from fastdeploy_rl.publish.publisher import retire

    retired = retire(options.ipc_dir)
    if options.json:
        print_json(retired._asdict())
    elif not retired.version and not retired.num_bytes:
        print("nothing was published")
    else:
        print(f"retired version {retired.version or 'none'}: {megabytes(retired.num_bytes)} of shared memory")
    return 0
