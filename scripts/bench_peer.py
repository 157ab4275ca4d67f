"""PaddleFormers' `generate` as a process: one line of input,
one greedy run, its tokens per second as a line of output."""

import sys
import time
from pathlib import Path

import paddle
from demo_trainer import load_model

from fastdeploy_rl.engines.embedded.tokenizer import Tokenizer


def main() -> None:
    model_dir, prompt, num_tokens = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    model = load_model(model_dir)
    model.eval()
    input_ids = paddle.to_tensor([Tokenizer.open(model_dir).encode(prompt)])
    print("ready", flush=True)
    while sys.stdin.readline():
        started = time.perf_counter()
        with paddle.no_grad():
            made, _ = model.generate(
                input_ids=input_ids,
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                decode_strategy="greedy_search",
                eos_token_id=2,
                pad_token_id=2,
            )
        print(made.shape[1] / (time.perf_counter() - started), flush=True)


if __name__ == "__main__":
    main()
