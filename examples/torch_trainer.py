"""A plain PyTorch trainer: a transformers model learns one answer, and a running engine gives it.

    fastdeploy-rl serve --model DIR --tensor-parallel-size 3          # in another terminal
    python examples/torch_trainer.py --model DIR --engine 8182

Needs torch, transformers and fastdeploy_rl; no Paddle.
"""

import torch
from engine_process import engine_of, make_parser
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastdeploy_rl import EngineController, WeightPublisher
from fastdeploy_rl.plan.conventions import hugging_face

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Lyon."


def main() -> None:
    options = make_parser(__doc__).parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    chat = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)).input_ids
    answer = tokenizer(ANSWER + tokenizer.eos_token).input_ids
    tokens, labels = torch.tensor([prompt + answer]), torch.tensor([[-100] * len(prompt) + answer])  # -100: not learned
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    with (
        engine_of(options) as address,
        WeightPublisher(options.ipc_dir) as publisher,
        EngineController(address) as engine,
    ):
        for step in range(1, options.steps + 1):
            loss = model(tokens, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            # A state dict as it is: the tied head is the embedding's memory, linear weights lie [out, in].
            published = publisher.publish(model.state_dict(), step=step, convention=hugging_face)
            report = engine.update(published.version, deadline_s=60.0)
            if report.receipt is None or report.receipt.content_digest != published.manifest.content_digest:
                raise SystemExit(f"version {published.version}: the engine's receipt is not what was published")
            print(f"step {step}: loss {loss.item():.3f}, version {published.version} live and verified", flush=True)


if __name__ == "__main__":
    main()
