"""What a Llama says whose weights change while it answers, worked out in numpy by nothing of the engine's.

One sequence with keys and values of its own. At a switch it goes on with those that older weights made (`keep`), or
computes them anew (`rebuild`). `disagreements` holds an engine's answer against it: each token must be the likeliest of
the version that it is stamped with, after the tokens before it and with the keys and values that it had then.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy_llama import Floats, head, layer_weights, log_softmax, normalize, rotary, rotate, split

NOISE = 1e-3
"""Far above what float32 and the order of a sum change in a log-probability here, far below what other weights do."""


class Version(NamedTuple):
    """Weights in engine layout, and whether requests in flight kept their keys and values when these came."""

    weights: Mapping[str, Floats]
    keeps_kv: bool = False


class Span(NamedTuple):
    """Tokens [start, end) of a completion were made by `version`."""

    version: str
    start: int
    end: int


class Answer(NamedTuple):
    """What an engine made of a prompt, and what it says about it. `logprobs` may be empty: not asked for."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    spans: Sequence[Span]
    finish_reason: str

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> "Answer":
        """A whole response of one choice, with token ids."""
        return cls.of_events([body])

    @classmethod
    def of_events(cls, events: Sequence[Mapping[str, Any]]) -> "Answer":
        """The same from a stream, which must have come to its end. ValueError: it ended in an error."""
        if "error" in events[-1]:
            raise ValueError(f"after {len(events) - 1} chunks: {events[-1]['error']}")
        choices = [event["choices"][0] for event in events]
        tokens = [token for choice in choices for token in choice.get("completion_token_ids", ())]
        logprobs = [value for choice in choices if choice["logprobs"] for value in choice["logprobs"]["token_logprobs"]]
        last = choices[-1]
        spans = [Span(**span) for span in last["weight_versions"]]
        stamps = [choice["weight_version"] for choice in choices if "weight_version" in choice]
        if stamps and stamps != [span.version for span in spans for _ in range(span.start, span.end)]:
            raise ValueError(f"chunks say {stamps}, and in the end it is {spans}")
        return cls(last["prompt_token_ids"], tokens, logprobs, spans, last["finish_reason"])


class SwitchingLlama:
    """One sequence of tokens, whose keys and values it remembers."""

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, Floats]) -> None:
        self._config = config
        self._weights = weights
        self._head_dim = int(config["hidden_size"]) // int(config["num_attention_heads"])
        self._token_ids: list[int] = []
        self._cache: list[tuple[Floats, Floats]] = []
        self._forget()

    def _forget(self) -> None:
        empty = np.zeros((int(self._config["num_key_value_heads"]), 0, self._head_dim))
        self._cache = [(empty, empty)] * int(self._config["num_hidden_layers"])

    def switch(self, weights: Mapping[str, Floats], *, keeps_kv: bool) -> None:
        """From now on these weights; without `keeps_kv` what they make of all tokens so far takes the old ones'
        place."""
        self._weights = weights
        if not keeps_kv:
            token_ids, self._token_ids = self._token_ids, []
            self._forget()
            self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> Floats:
        """Log-probabilities of what follows each of these tokens: [tokens, vocab]."""
        if not token_ids:
            return np.zeros((0, int(self._config["vocab_size"])))
        start, eps = len(self._token_ids), float(self._config["rms_norm_eps"])
        self._token_ids += token_ids
        turns = rotary(len(self._token_ids), self._head_dim, float(self._config["rope_theta"]))
        cosines, sines = (turn[start:] for turn in turns)
        hidden = self._weights["model.embed_tokens.weight"][list(token_ids)].astype(np.float64)
        for index in range(len(self._cache)):
            layer = layer_weights(self._weights, index)
            normed = normalize(hidden, layer["input_layernorm"], eps)
            hidden = hidden + self._attend(index, normed, layer, cosines, sines) @ layer["self_attn.o_proj"]
            normed = normalize(hidden, layer["post_attention_layernorm"], eps)
            gate = normed @ layer["mlp.gate_proj"]
            hidden = hidden + (gate / (1 + np.exp(-gate)) * (normed @ layer["mlp.up_proj"])) @ layer["mlp.down_proj"]
        return log_softmax(normalize(hidden, self._weights["model.norm.weight"], eps) @ head(self._weights).T)

    def _attend(
        self, index: int, normed: Floats, layer: Mapping[str, Floats], cosines: Floats, sines: Floats
    ) -> Floats:
        """Stores the new keys and values. -> [tokens, heads * head_dim]"""
        heads, kv_heads = int(self._config["num_attention_heads"]), int(self._config["num_key_value_heads"])
        query = rotate(split(normed @ layer["self_attn.q_proj"], heads), cosines, sines)
        key = rotate(split(normed @ layer["self_attn.k_proj"], kv_heads), cosines, sines)
        value = split(normed @ layer["self_attn.v_proj"], kv_heads)
        keys, values = self._cache[index]
        keys, values = np.concatenate([keys, key], 1), np.concatenate([values, value], 1)
        self._cache[index] = keys, values
        scores = query @ keys.repeat(heads // kv_heads, 0).transpose(0, 2, 1) / np.sqrt(self._head_dim)
        count, total = len(normed), keys.shape[1]
        is_past = np.tri(count, total, total - count, dtype=bool)
        weighed = np.exp(log_softmax(np.where(is_past, scores, -np.inf))) @ values.repeat(heads // kv_heads, 0)
        return weighed.transpose(1, 0, 2).reshape(count, -1)


class Decoded(NamedTuple):
    tokens: list[int]
    logprobs: list[float]


def decode(
    config: Mapping[str, Any], versions: Mapping[str, Version], prompt: Sequence[int], spans: Sequence[Span]
) -> Decoded:
    """Greedily, token by token, switching where the spans say so."""
    llama = SwitchingLlama(config, versions[spans[0].version].weights)
    decoded, fresh = Decoded([], []), list(prompt)
    for number, span in enumerate(spans):
        if number:
            _switch(llama, versions, spans[number - 1], span)
        for _ in range(span.start, span.end):
            row = llama.extend(fresh)[-1]
            fresh = [int(row.argmax())]
            decoded.tokens.append(fresh[0])
            decoded.logprobs.append(float(row.max()))
    return decoded


def _switch(llama: SwitchingLlama, versions: Mapping[str, Version], before: Span, after: Span) -> None:
    """A version in between that made no token of this answer may have been a rebuild."""
    first, last = _order(before.version), _order(after.version)
    passed = [version for name, version in versions.items() if first < _order(name) <= last]
    llama.switch(versions[after.version].weights, keeps_kv=all(version.keeps_kv for version in passed))


def disagreements(config: Mapping[str, Any], versions: Mapping[str, Version], answer: Answer) -> list[str]:
    """What in an answer is not as its own spans have it; nothing where all is well.

    Step by step this is the same as `decode`, but where two tokens are as likely as each other the engine's counts, and
    all tokens of a span go through the model at once."""
    problems = broken_spans(answer)
    if problems or not answer.spans:
        return problems
    llama = SwitchingLlama(config, versions[answer.spans[0].version].weights)
    num_fed, sequence = 0, [*answer.prompt, *answer.tokens]
    for number, span in enumerate(answer.spans):
        if number:
            _switch(llama, versions, answer.spans[number - 1], span)
        end = len(answer.prompt) + span.end - 1
        rows = llama.extend(sequence[num_fed:end])[-(span.end - span.start) :]
        num_fed = end
        problems += _unlike(rows, span, answer)
    return problems


def _unlike(rows: Floats, span: Span, answer: Answer) -> list[str]:
    chosen = np.array(answer.tokens[span.start : span.end])
    found = rows[np.arange(len(chosen)), chosen]
    problems = [
        f"token {span.start + place} of version {span.version} is {chosen[place]}, the likeliest is "
        f"{rows[place].argmax()}, by {rows[place].max() - found[place]:.4f}"
        for place in np.flatnonzero(rows.max(-1) - found > NOISE)
    ]
    if answer.logprobs:
        said = np.array(answer.logprobs[span.start : span.end])
        problems += [
            f"token {span.start + place} of version {span.version} has log-probability {said[place]:.5f}, "
            f"not {found[place]:.5f}"
            for place in np.flatnonzero(np.abs(said - found) > NOISE)
        ]
    return problems


def broken_spans(answer: Answer) -> list[str]:
    """Spans must follow each other without a gap, name each version once, add up to the tokens and never go back."""
    problems, end = [], 0
    for before, span in zip([None, *answer.spans], answer.spans, strict=False):
        if span.start != end or span.end <= span.start:
            problems.append(f"span {span} does not follow on {end}")
        if before is not None and _order(span.version) <= _order(before.version):
            problems.append(f"version {span.version} comes after {before.version}")
        end = span.end
    if end != len(answer.tokens):
        problems.append(f"spans end at {end}, and there are {len(answer.tokens)} tokens")
    if answer.logprobs and len(answer.logprobs) != len(answer.tokens):
        problems.append(f"{len(answer.logprobs)} log-probabilities for {len(answer.tokens)} tokens")
    return problems


def _order(version: str) -> tuple[int, int]:
    epoch, step = version.split(".")
    return int(epoch), int(step)
