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
    model = load(job["directory"])
    if "save_to" in job:
        model.save_pretrained(job["save_to"])
        return
    outputs = [continue_greedily(model, prompt, job["max_tokens"]) for prompt in job["prompts"]]
    tokens = [own for own, _ in outputs]
    write(Path(job["out"]), alone=Generated(tokens, np.stack([logits for _, logits in outputs])))


def load(directory: str) -> Any:
    config = LlamaConfig.from_pretrained(directory)
    config.fuse_rms_norm = False  # the fused kernel is not registered on a CPU
    model = LlamaForCausalLM.from_pretrained(directory, config=config)
    model.eval()
    return model


def continue_greedily(model: Any, prompt: list[int], max_tokens: int) -> tuple[list[int], np.ndarray]:
    """(new tokens, logits of the prompt's last token)"""
    input_ids = paddle.to_tensor([prompt])
    with paddle.no_grad():
        logits = model(input_ids)[0].numpy()[0, -1]
        output, _ = model.generate(
            input_ids=input_ids,
            max_new_tokens=max_tokens,
            decode_strategy="greedy_search",
            eos_token_id=-1,
            pad_token_id=0,
        )
    return output[0].tolist(), logits


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1]))
