"""`publish`: puts a checkpoint on a channel, as a trainer would."""

import argparse
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from fastdeploy_rl.cli.progress import SlowProgress
from fastdeploy_rl.config import Deadlines

if TYPE_CHECKING:
    from fastdeploy_rl.engines.embedded.checkpoint import Checkpoint

_EXAMPLES = """\
  fastdeploy-rl publish ~/checkpoints/step-1200 --step 1200
  fastdeploy-rl publish DIR --step 7 --layout tp:3      # cut for three ranks, so that each can use it in place
  fastdeploy-rl publish DIR --step 8 --as-stored        # bf16 stays bf16, [out, in] stays [out, in]"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "publish", "publish a checkpoint; it stays until the next one or `retire`", _EXAMPLES)
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="Hugging Face directory of a Llama, Qwen2 or Qwen3 model"
    )
    parser.add_argument("--step", type=_step, required=True, metavar="N", help="the training step of these weights")
    parser.add_argument(
        "--layout", default="full", metavar="full|tp:N", help="whole tensors (default) or cut for N ranks"
    )
    parser.add_argument(
        "--as-stored",
        action="store_true",
        help="leave dtype and orientation ([out, in]) as in the file: quicker to publish, and every rank turns its own",
    )
    add_channel(parser)
    add_deadline(parser, Deadlines.publish_s)
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from fastdeploy_rl.engines.embedded.checkpoint import Checkpoint
    from fastdeploy_rl.plan.conventions import hugging_face, paddle_llama
    from fastdeploy_rl.publish.publisher import WeightPublisher

    with Checkpoint.open(options.directory) as checkpoint:
        tensors = _stored(checkpoint) if options.as_stored else _turned(checkpoint)
    publisher = WeightPublisher(options.ipc_dir, deadline_s=options.deadline)
    publisher.start()
    try:
        with SlowProgress("publishing") as progress:
            published = publisher.publish(
                tensors,
                step=options.step,
                layout=options.layout,
                convention=hugging_face if options.as_stored else paddle_llama,
                on_progress=progress.update,
            )
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


def _turned(checkpoint: "Checkpoint") -> dict[str, Any]:
    """Every tensor as the engine has it, float32: an update can use them in place."""
    from fastdeploy_rl.coverage import Coverage

    total = sum(4 * prod(spec.shape) for spec in checkpoint.specs if spec.coverage is Coverage.UPDATED)
    tensors: dict[str, Any] = {}
    done = 0
    with SlowProgress("reading") as progress:
        for name, tensor in checkpoint.tensors():
            tensors[name] = tensor
            done += tensor.nbytes
            progress.update(done, total)
    return tensors


def _stored(checkpoint: "Checkpoint") -> dict[str, Any]:
    """Views of the mapped files: nothing is read before it is copied out."""
    names = [spec.name for spec in checkpoint.specs if spec.name in checkpoint.files]
    return {name: checkpoint.files[name].view(name).numpy() for name in names}


def _step(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text[:20]) >= 2**63:
        raise argparse.ArgumentTypeError(f"expected a step from 0 on, got {text!r}")
    return int(text)
