"""`publish`: puts a checkpoint on a channel, as a trainer would."""

import argparse
from pathlib import Path

from fastdeploy_rl.cli.options import (
    Verbs,
    add_channel,
    add_deadline,
    add_json,
    add_verb,
    megabytes,
    print_fields,
    print_json,
)

_EXAMPLES = """\
  fastdeploy-rl publish ~/checkpoints/step-1200 --step 1200
  fastdeploy-rl publish DIR --step 7 --layout tp:3      # cut for three ranks, so that each can use it in place"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "publish", "publish a checkpoint; it stays until the next one or `retire`", _EXAMPLES)
    parser.add_argument("directory", type=Path, metavar="DIR", help="Hugging Face directory of a Llama, Qwen2 or Qwen3 model")
    parser.add_argument("--step", type=_step, required=True, metavar="N", help="the training step of these weights")
    parser.add_argument(
        "--layout", default="full", metavar="full|tp:N", help="whole tensors (default) or cut for N ranks"
    )
    add_channel(parser)
    add_deadline(parser, 30.0)
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from fastdeploy_rl.engines.embedded.checkpoint import Checkpoint
    from fastdeploy_rl.publish.publisher import WeightPublisher

    with Checkpoint.open(options.directory) as checkpoint:
        tensors = dict(checkpoint.tensors())
    publisher = WeightPublisher(options.ipc_dir, deadline_s=options.deadline)
    publisher.start()
    try:
        published = publisher.publish(tensors, step=options.step, layout=options.layout)
    finally:
        # Also where it failed: what was published before is not ours to take away.
        publisher.close(keep=True)
    result = {
        "version": str(published.version),
        "num_bytes": published.num_bytes,
        "num_tensors": len(published.manifest.tensors),
        "layout": published.manifest.layout,
        "content_digest": published.manifest.content_digest,
        "seconds": published.seconds,
        "channel": str(publisher.channel.path),
    }
    if options.json:
        print_json(result)
    else:
        print(f"published version {published.version}: {megabytes(published.num_bytes)} in {published.seconds:.2f} s")
        print_fields(**{name: result[name] for name in ("layout", "num_tensors", "content_digest", "channel")})
    return 0


def _step(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text[:20]) >= 2**63:
        raise argparse.ArgumentTypeError(f"expected a step from 0 on, got {text!r}")
    return int(text)
