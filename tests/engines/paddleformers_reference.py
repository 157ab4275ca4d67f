"""PaddleFormers' LlamaForCausalLM on a checkpoint, as a program: python paddleformers_reference.py JOB (JSON)."""

import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import paddle
from paddleformers.transformers import LlamaConfig, LlamaForCausalLM
from tiny_llama import Generated, write


def main(job: dict[str, Any]) -> None:
    if "save_to" in job:
        load(job["directory"]).save_pretrained(job["save_to"])
    for case in job.get("cases", ()):
        model = load(case["directory"])
        answers = [follow(model, *pair) for pair in zip(case["prompts"], case["continuations"], strict=True)]
        tokens = [own for own, _ in answers]
        write(Path(case["out"]), alone=Generated(tokens, np.stack([logits for _, logits in answers])))


def load(directory: str) -> Any:
    config = LlamaConfig.from_pretrained(directory)
    config.fuse_rms_norm = False  # the fused kernel is not registered on a CPU
    model = LlamaForCausalLM.from_pretrained(directory, config=config)
    model.eval()
    return model


def follow(model: Any, prompt: list[int], continuation: list[int]) -> tuple[list[int], np.ndarray]:
    """(most likely token after each prefix, logits of the prompt's last token)"""
    with paddle.no_grad():
        logits = model(paddle.to_tensor([prompt + continuation[:-1]]))[0].numpy()[0, len(prompt) - 1 :]
    return logits.argmax(axis=-1).tolist(), logits[0]


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1]))
