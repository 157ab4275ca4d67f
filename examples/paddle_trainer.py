"""A PaddleFormers trainer: its model learns one answer, and an engine gives it, using published memory in place.

python examples/paddle_trainer.py --model "$(scripts/make_model)" --ranks 3
"""

import paddle
import paddle.nn.functional as F  # noqa: N812 - its usual name
from engine_process import engine_of, make_parser
from paddleformers.transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from safetensors.numpy import load_file

from fastdeploy_rl import EngineController, WeightPublisher
from fastdeploy_rl.plan.conventions import paddleformers

CHAT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "The capital of France is Lyon.<|im_end|>"


def load_model(directory: str) -> LlamaForCausalLM:
    """With the weights of a Hugging Face directory, whose linear weights are [out, in] and Paddle's [in, out]."""
    config = LlamaConfig.from_pretrained(directory)
    config.fuse_rms_norm = False  # the fused kernel is not registered on a CPU
    model = LlamaForCausalLM(config)
    parameters = model.state_dict()
    for name, value in load_file(f"{directory}/model.safetensors").items():
        parameters[name].set_value(value.T if name.endswith("_proj.weight") else value)
    return model


def main() -> None:
    options = make_parser(__doc__).parse_args()
    model = load_model(str(options.model))
    tokenizer = AutoTokenizer.from_pretrained(str(options.model))
    prompt, answer = tokenizer(CHAT).input_ids, tokenizer(ANSWER).input_ids
    tokens, targets = paddle.to_tensor([prompt + answer]), paddle.to_tensor(answer)
    optimizer = paddle.optimizer.AdamW(2e-5, parameters=model.parameters())
    convention = paddleformers(model.config)
    with (
        engine_of(options) as address,
        WeightPublisher(options.ipc_dir) as publisher,
        EngineController(address) as engine,
    ):
        for step in range(1, options.steps + 1):
            logits = model(tokens)[0][0]
            loss = F.cross_entropy(logits[-len(answer) - 1 : -1], targets)
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            # Cut for the engine's ranks, so that each uses its part of the published memory in place.
            layout = f"tp:{options.ranks}"
            published = publisher.publish(model.state_dict(), step=step, layout=layout, convention=convention)
            report = engine.update(published.version, deadline_s=60.0)
            if report.receipt is None or report.receipt.content_digest != published.manifest.content_digest:
                raise SystemExit(f"version {published.version}: the engine's receipt is not what was published")
            print(f"step {step}: loss {float(loss):.3f}, version {published.version} live and verified", flush=True)


if __name__ == "__main__":
    main()
