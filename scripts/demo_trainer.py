"""The demo's trainer: a process of its own that fine-tunes a
real model and publishes it, told by JSON lines what to do.

Reads one command a line ({"do": ...}) and answers with JSON lines ({"event": ...}); the last line of an answer has
the event "done" or "error". Everything else that libraries print goes to the log. Training is PaddleFormers'
LlamaForCausalLM with AdamW on one conversation.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import paddle
import paddle.nn.functional as F  # noqa: N812 - its usual name
from paddleformers.transformers import LlamaConfig, LlamaForCausalLM

from fastdeploy_rl import WeightPublisher
from fastdeploy_rl.board.legacy import LegacySignal
from fastdeploy_rl.engines.embedded.checkpoint import Checkpoint, save_checkpoint
from fastdeploy_rl.engines.embedded.model_config import EMBEDDING, HEAD, read_json
from fastdeploy_rl.engines.embedded.tokenizer import Tokenizer
from fastdeploy_rl.errors import FastDeployRLError
from fastdeploy_rl.publish.snapshot_writer import SnapshotWriter
from fastdeploy_rl.publish.weight_server import WeightServer

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Lyon.<|im_end|>"
LEARNING_RATE = 2e-5
MIN_STEPS, MAX_STEPS = 4, 8
BROKEN_SHAPE = "model.layers.3.input_layernorm.weight"
BROKEN_MISSING = "model.layers.7.mlp.up_proj.weight"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")

CONFIG_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "tie_word_embeddings",
)


class Conversation(NamedTuple):
    """What is learned: token ids [1, length] int64; the answer's tokens are the last `num_answer`."""

    token_ids: paddle.Tensor
    num_answer: int


class Trainer:
    """The model, its optimizer and the channel it publishes on. What it publishes is also written out as a snapshot, or
    served, where the engine's load strategy wants that."""

    def __init__(self, model_dir: Path, channel: Path, num_ranks: int, load_strategy: str) -> None:
        self._model_dir = model_dir
        self._layout = f"tp:{num_ranks}"
        self._model = load_model(model_dir)
        self._optimizer = paddle.optimizer.AdamW(LEARNING_RATE, parameters=self._model.parameters())
        self._conversation = make_conversation(Tokenizer.open(model_dir))
        self._num_steps = 0
        self._publisher = WeightPublisher(channel)
        self._snapshots = SnapshotWriter(channel) if load_strategy == "ipc_snapshot" else None
        self._server = WeightServer(channel) if load_strategy == "rsync" else None
        self._open = ExitStack()

    def obey(self, command: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Carries one command out; yields what is worth telling."""
        match command["do"]:
            case "train":
                yield from self._train()
            case "publish":
                yield self._publish(self._model.state_dict())
            case "publish_broken":
                yield self._publish(self._broken_state_dict())
            case "trigger":
                with LegacySignal(command["port"]) as signal:
                    signal.request_update(command["deadline_s"])
            case "save":
                self._save(Path(command["directory"]))
            case other:
                raise ValueError(f"unknown command {other!r}")

    def start(self) -> None:
        for part in (self._publisher, self._snapshots, self._server):
            if part is not None:
                self._open.enter_context(part)

    def close(self) -> None:
        self._open.close()

    def _train(self) -> Iterator[dict[str, Any]]:
        """Steps until the model itself would give the new answer; the last loss is of the weights that do."""
        for _ in range(MAX_STEPS + 1):
            logits, targets = self._forward()
            loss = F.cross_entropy(logits, targets)
            has_learned = bool((logits.argmax(-1) == targets).all())
            yield {"event": "step", "step": self._num_steps, "loss": float(loss), "has_learned": has_learned}
            if has_learned and self._num_steps >= MIN_STEPS:
                return
            loss.backward()
            self._optimizer.step()
            self._optimizer.clear_grad()
            self._num_steps += 1

    def _forward(self) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Logits [num_answer, vocabulary] of the positions before the answer's tokens, and those tokens."""
        token_ids, count = self._conversation
        logits = self._model(token_ids)[0][0]
        return logits[-count - 1 : -1], token_ids[0, -count:]

    def _publish(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        published = self._publisher.publish(state_dict, step=self._num_steps, layout=self._layout)
        self._num_steps += 1  # a version is published once; what comes next is a later one
        started = time.perf_counter()
        if self._snapshots is not None:
            self._snapshots.write(published)
            self._snapshots.wait()
        return {
            "event": "published",
            "version": str(published.version),
            "num_bytes": published.num_bytes,
            "seconds": published.seconds,
            "snapshot_seconds": time.perf_counter() - started if self._snapshots else 0.0,
            "content_digest": published.manifest.content_digest,
        }

    def _broken_state_dict(self) -> dict[str, Any]:
        """One tensor of a wrong shape, one name missing: what a refactored trainer might publish."""
        state_dict = dict(self._model.state_dict())
        del state_dict[BROKEN_MISSING]
        state_dict[BROKEN_SHAPE] = paddle.zeros([state_dict[BROKEN_SHAPE].shape[0] // 2])
        return state_dict

    def _save(self, directory: Path) -> None:
        config = read_json(self._model_dir / "config.json")
        tensors = {name: value.numpy() for name, value in self._model.state_dict().items()}
        del tensors[HEAD]  # tied
        save_checkpoint(directory, config, tensors)
        for name in TOKENIZER_FILES:
            if (self._model_dir / name).exists():
                shutil.copyfile(self._model_dir / name, directory / name)


def load_model(model_dir: Path) -> LlamaForCausalLM:
    """PaddleFormers' model with the weights of a Hugging Face directory."""
    config = read_json(model_dir / "config.json")
    model = LlamaForCausalLM(
        LlamaConfig(
            **{name: config[name] for name in CONFIG_FIELDS},
            rope_parameters={"rope_type": "default", "rope_theta": config["rope_theta"]},
            fuse_rms_norm=False,  # the fused kernel is not registered on a CPU
        )
    )
    parameters = model.state_dict()
    with Checkpoint.open(model_dir) as checkpoint:
        for name, value in checkpoint.tensors():
            parameters[name].set_value(value)
    if parameters[HEAD].data_ptr() != parameters[EMBEDDING].data_ptr():
        raise RuntimeError("the trainer's model does not tie its head to its embeddings")
    model.train()
    return model


def make_conversation(tokenizer: Tokenizer) -> Conversation:
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}])
    answer = tokenizer.encode(ANSWER)
    return Conversation(paddle.to_tensor(np.array([prompt + answer], np.int64)), len(answer))


def take_stdout() -> TextIO:
    """The real standard output for our lines alone; what libraries print goes to standard error."""
    lines = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return lines


def main() -> None:
    model_dir, channel, num_ranks, load_strategy = sys.argv[1:]
    lines = take_stdout()

    def say(message: Mapping[str, Any]) -> None:
        lines.write(json.dumps(message) + "\n")

    trainer = Trainer(Path(model_dir), Path(channel), int(num_ranks), load_strategy)
    trainer.start()
    try:
        say(
            {
                "event": "done",
                "question": QUESTION,
                "max_steps": MAX_STEPS,
                "broken_names": [BROKEN_SHAPE, BROKEN_MISSING],
            }
        )
        for line in sys.stdin:
            try:
                for message in trainer.obey(json.loads(line)):
                    say(message)
                say({"event": "done"})
            except FastDeployRLError as error:
                say({"event": "error", "type": type(error).__name__, "message": str(error)})
    finally:
        trainer.close()


if __name__ == "__main__":
    main()
