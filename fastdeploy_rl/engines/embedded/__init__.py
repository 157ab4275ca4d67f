"""The small engine: a Llama decoder on PaddlePaddle, tensor parallel, paged KV cache, continuous batching."""
