"""`serve` as the `openai` Python client and the command line meet it: real workers, real sockets, a small model.

What the engine says is held against a Llama in numpy (numpy_llama.py), which knows nothing of the engine's.
"""

import asyncio
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy_llama
import openai
import pytest
from lively_model import lively_weights
from openai import AsyncOpenAI, OpenAI
from served_engine import DEADLINE_S, Model, ServedEngine, Weights

from fastdeploy_rl.control.controller import EngineController
from fastdeploy_rl.engines.embedded.checkpoint import save_checkpoint
from fastdeploy_rl.publish.publisher import WeightPublisher
from tests.process.served_model import CONFIG, write_tiny_llama

MAX_RUNNING, MAX_WAITING = 8, 8
SETTINGS = CONFIG | {"max_position_embeddings": 2048, "tie_word_embeddings": False}
PROMPT = "once upon a time"
GREEDY = {"temperature": 0, "max_tokens": 24}
TOKENS = {"ignore_eos": True, "return_token_ids": True}
CLI = [sys.executable, "-m", "fastdeploy_rl.cli"]
NOISE = 1e-4
"""Far above what float32 and the order of a sum change in a logit here, far below what other weights do."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", **SETTINGS)
    weights = lively_weights(directory, 0)
    save_checkpoint(directory, SETTINGS, weights)
    return Model(directory, weights)


@pytest.fixture(scope="module")
def engine(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    limits = ("--max-num-seqs", str(MAX_RUNNING), "--max-waiting", str(MAX_WAITING))
    with ServedEngine(model, tmp_path_factory.mktemp("engine"), num_ranks=1, options=limits) as served:
        served.await_ready()
        yield served


@pytest.fixture
def client(engine: ServedEngine) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
        yield client


def messages(text: str = "hello") -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def answers_of(model: Model, prompt: list[int], tokens: list[int]) -> np.ndarray:
    """Log-probabilities before each of the tokens: [tokens, vocab]."""
    values = numpy_llama.logits(SETTINGS, model.weights, [*prompt, *tokens][:-1])
    return numpy_llama.log_softmax(values)[len(prompt) - 1 :]


# --- answers -----------------------------------------------------------------------------------------


def test_models_are_listed_and_found(client: OpenAI) -> None:
    (card,) = client.models.list().data
    assert card.id == "tiny"
    assert client.models.retrieve("tiny") == card
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("large")


def test_a_streamed_completion_is_the_whole_one_in_pieces(client: OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt=PROMPT, **GREEDY)
    chunks = list(
        client.completions.create(
            model="tiny", prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert whole.usage.prompt_tokens == len(PROMPT)
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_a_streamed_chat_is_the_whole_one_in_pieces(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=messages(), **GREEDY)
    with client.chat.completions.create(model="tiny", messages=messages(), stream=True, **GREEDY) as stream:
        deltas = [chunk.choices[0].delta for chunk in stream]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    again = [*messages(), whole.choices[0].message, {"role": "user", "content": [{"type": "text", "text": "and?"}]}]
    assert client.chat.completions.create(model="tiny", messages=again, max_completion_tokens=3).usage.total_tokens > 20


def test_log_probabilities_are_the_models(client: OpenAI, model: Model) -> None:
    chat = client.chat.completions.create(
        model="tiny", messages=messages(), logprobs=True, top_logprobs=20, temperature=1.3, seed=3, max_tokens=8,
        extra_body=TOKENS,
    )  # fmt: skip
    choice = chat.choices[0].model_dump()
    prompt, tokens = choice["prompt_token_ids"], choice["completion_token_ids"]
    expected = answers_of(model, prompt, tokens)
    content = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == pytest.approx(expected[range(8), tokens], abs=NOISE)
    for entry, row in zip(content, expected, strict=True):
        assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx(np.sort(row)[::-1][:20], abs=NOISE)
    text = client.completions.create(model="tiny", prompt=prompt, logprobs=5, **GREEDY).choices[0].logprobs
    assert text.token_logprobs == pytest.approx([max(top.values()) for top in text.top_logprobs])


def test_choices_are_numbered_and_each_seed_gives_its_tokens_whatever_the_batch(client: OpenAI) -> None:
    options = {
        "model": "tiny",
        "temperature": 1.2,
        "top_p": 0.95,
        "max_tokens": 30,
        "extra_body": TOKENS | {"top_k": 50},
    }

    def tokens(seed: int, n: int = 1) -> list[list[int]]:
        choices = client.completions.create(prompt=PROMPT, seed=seed, n=n, **options).choices
        assert [choice.index for choice in choices] == list(range(n))
        return [choice.completion_token_ids for choice in choices]

    together = tokens(5, n=4)
    assert len({tuple(found) for found in together}) == 4
    assert together == [tokens(seed)[0] for seed in (5, 6, 7, 8)]
    streamed: dict[int, list[int]] = {}
    for chunk in client.completions.create(prompt=PROMPT, seed=5, n=4, stream=True, **options):
        (choice,) = chunk.choices
        streamed.setdefault(choice.index, []).extend(choice.model_extra.get("completion_token_ids", ()))
    assert [streamed[index] for index in range(4)] == together


def test_a_list_of_prompts_gives_the_answers_of_each(client: OpenAI) -> None:
    prompts = ["one", "two two", PROMPT]
    together = client.completions.create(model="tiny", prompt=prompts, **GREEDY).choices
    alone = [client.completions.create(model="tiny", prompt=prompt, **GREEDY).choices[0].text for prompt in prompts]
    assert [choice.text for choice in together] == alone
    ids = [list(prompt.encode()) for prompt in ("aa", "bbb")]
    assert len(client.completions.create(model="tiny", prompt=ids, n=2, **GREEDY).choices) == 4


def test_a_stop_string_never_shows_also_where_it_spans_tokens(client: OpenAI) -> None:
    options = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 200, "extra_body": TOKENS}
    text = client.completions.create(**options).choices[0].text
    stop = next(text[i : i + 3] for i in range(20, len(text)) if "\ufffd" not in text[i : i + 3])
    expected = text[: text.index(stop)]
    stopped = client.completions.create(stop=[stop, "never there"], **options)
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (expected, "stop")
    assert stopped.usage.completion_tokens < 200
    chunks = client.completions.create(stop=stop, stream=True, **options)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected


def test_penalties_and_bias_reach_the_model(client: OpenAI) -> None:
    def tokens(**options: Any) -> list[int]:
        answer = client.completions.create(model="tiny", prompt=PROMPT, extra_body=TOKENS, **(GREEDY | options))
        return answer.choices[0].completion_token_ids

    assert tokens(logit_bias={"65": 100}) == [65] * 24
    assert len(set(tokens(frequency_penalty=2, logit_bias={"65": 5, "66": 5}))) > 1
    first = tokens()[0]
    assert first not in tokens(logit_bias={str(first): -100})


def test_impossible_requests_are_errors_of_the_clients_own_kinds(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="large", prompt=PROMPT)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt="x" * 3000)
    assert long.value.code == "context_length_exceeded"
    for options, param in (({"temperature": 3}, "temperature"), ({"n": 17}, "n"), ({"tools": []}, "tools")):
        with pytest.raises(openai.BadRequestError) as impossible:
            client.chat.completions.create(model="tiny", messages=messages(), **options)
        assert impossible.value.param == param
    with pytest.raises(openai.BadRequestError, match="tool"):
        client.chat.completions.create(model="tiny", messages=[{"role": "tool", "content": "5", "tool_call_id": "1"}])


# --- clients that go away, and too many of them ------------------------------------------------------


def load(engine: ServedEngine) -> dict[str, int]:
    """Requests running and waiting, pages free and held, as /metrics has them."""
    page = engine.http.get("/metrics").text
    found = re.findall(r'^fastdeploy_rl_(?:requests_now|kv_pages)\{state="(\w+)"\} (\d+)', page, re.MULTILINE)
    return {state: int(number) for state, number in found}


def await_load(engine: ServedEngine, **expected: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while (now := load(engine)) != now | expected:
        assert time.monotonic() < deadline, f"{now}, never {expected}"


def with_clients(engine: ServedEngine, scene: Callable[[AsyncOpenAI], Awaitable[None]]) -> None:
    async def play() -> None:
        url = f"{engine.url}/v1"
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
            await scene(client)

    asyncio.run(play())


LONG = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 2000, "extra_body": TOKENS}
IDLE = {"running": 0, "waiting": 0, "held": 0}


def test_a_client_that_goes_away_gives_its_pages_back_streaming_whole_or_queued(engine: ServedEngine) -> None:
    async def scene(client: AsyncOpenAI) -> None:
        stream = await client.completions.create(n=MAX_RUNNING - 1, stream=True, **LONG)
        await anext(aiter(stream))
        whole = asyncio.create_task(client.completions.create(**LONG))
        await asyncio.to_thread(await_load, engine, running=MAX_RUNNING, waiting=0)
        queued = [
            asyncio.create_task(client.completions.create(stream=is_stream, **LONG)) for is_stream in (False, True)
        ]
        await asyncio.to_thread(await_load, engine, running=MAX_RUNNING, waiting=2)
        for task in queued:
            task.cancel()
        await asyncio.to_thread(await_load, engine, running=MAX_RUNNING, waiting=0)
        whole.cancel()
        await asyncio.to_thread(await_load, engine, running=MAX_RUNNING - 1)
        await stream.close()
        await asyncio.to_thread(await_load, engine, **IDLE)
        await asyncio.gather(whole, *queued, return_exceptions=True)

    assert load(engine) == load(engine) | IDLE
    with_clients(engine, scene)


def test_more_than_fits_is_told_to_come_back_and_nobody_else_notices(engine: ServedEngine) -> None:
    async def scene(client: AsyncOpenAI) -> None:
        stream = await client.completions.create(n=MAX_RUNNING + MAX_WAITING - 1, stream=True, **LONG)
        await anext(aiter(stream))
        for n in (2, 16):
            with pytest.raises(openai.RateLimitError, match="15 requests are running or waiting") as full:
                await client.completions.create(n=n, **LONG)
            assert int(full.value.response.headers["Retry-After"]) >= 1
        await asyncio.to_thread(await_load, engine, running=MAX_RUNNING, waiting=MAX_WAITING - 1)
        await stream.close()
        await asyncio.to_thread(await_load, engine, **IDLE)

    with_clients(engine, scene)


def test_a_reader_that_does_not_read_holds_up_nobody_and_then_gives_back_what_it_held(
    engine: ServedEngine, client: OpenAI
) -> None:
    body = LONG | TOKENS | {"n": MAX_RUNNING - 1, "stream": True, "logprobs": 5}
    data = json.dumps({name: value for name, value in body.items() if name != "extra_body"}).encode()
    with socket.create_connection(("127.0.0.1", engine.port)) as lazy:
        lazy.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data))
        await_load(engine, running=MAX_RUNNING - 1)
        assert len(client.completions.create(n=2, **LONG | {"max_tokens": 50}).choices) == 2
    await_load(engine, **IDLE)


# --- the command line --------------------------------------------------------------------------------


def run_cli(*arguments: str, given: str = "") -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*CLI, *arguments],
        input=given,
        capture_output=True,
        timeout=DEADLINE_S,
        check=False,
        text=True,
        encoding="utf-8",
    )


def test_generate_prints_the_text_whole_streamed_or_as_json(engine: ServedEngine, client: OpenAI) -> None:
    text = client.completions.create(model="tiny", prompt=PROMPT, **GREEDY).choices[0].text
    options = ("--max-tokens", "24", "--temperature", "0")
    whole = run_cli("generate", "--engine", str(engine.board_port), "--prompt", PROMPT, *options)
    assert (whole.returncode, whole.stdout, whole.stderr) == (0, text + "\n", "")
    streamed = run_cli("generate", "--engine", engine.url, "--prompt", "-", "--stream", *options, given=PROMPT)
    assert (streamed.returncode, streamed.stdout) == (0, text + "\n")
    found = json.loads(run_cli("generate", "--engine", engine.url, "--prompt", PROMPT, "--json", *options).stdout)
    assert found["choices"][0]["text"] == text
    refused = run_cli("generate", "--engine", engine.url, "--prompt", PROMPT, "--temperature", "9")
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert "temperature" in refused.stderr


def test_interrupted_generate_ends_quietly_and_the_engine_stops(engine: ServedEngine) -> None:
    command = [
        *CLI,
        "generate",
        "--engine",
        engine.url,
        "--prompt",
        PROMPT,
        "--max-tokens",
        "2000",
        "--temperature",
        "0",
        "--stream",
        "--json",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout.readline().startswith(b"{")
        child.send_signal(signal.SIGINT)
        _, complaint = child.communicate(timeout=DEADLINE_S)
    assert (child.returncode, complaint) == (130, b"")
    await_load(engine, **IDLE)


def test_a_piped_chat_answers_line_by_line_and_resets(engine: ServedEngine, client: OpenAI) -> None:
    options = {"model": "tiny", "temperature": 0, "max_tokens": 6}
    first = client.chat.completions.create(messages=messages(), **options).choices[0].message
    turns = [*messages(), first, *messages("and?")]
    second = client.chat.completions.create(messages=turns, **options).choices[0].message
    command = ("chat", "--engine", str(engine.board_port), "--temperature", "0", "--max-tokens", "6")
    done = run_cli(*command, "--json", given="hello\nand?\n\n/reset\nhello\n/quit\nnever asked\n")
    assert done.returncode == 0, done.stderr
    told = [json.loads(line)["content"] for line in done.stdout.splitlines()]
    assert told == [first.content, second.content, first.content]
    assert "tiny, weights " in done.stderr
    plain = run_cli(*command, given="hello\n")
    assert plain.stdout == first.content + "\n"


class Talker:
    """A chat that takes its terminal for a person."""

    def __init__(self, engine: ServedEngine, *options: str) -> None:
        self._terminal, theirs = pty.openpty()
        command = [*CLI, "chat", "--engine", engine.url, "--temperature", "0", *options]
        self.child = subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
        os.close(theirs)

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def await_text(self, pattern: bytes, *, stderr: bool = False) -> bytes:
        """Reads until it has come."""
        pipe, found = self.child.stderr if stderr else self.child.stdout, b""
        while not re.search(pattern, found):
            assert select.select([pipe], [], [], DEADLINE_S)[0], f"{found!r}, never {pattern!r}"
            found += pipe.read(1) or pytest.fail(f"{found!r}, and then the end")
        return found

    def __enter__(self) -> "Talker":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._terminal)
        self.child.kill()
        self.child.wait(DEADLINE_S)
        self.child.stdout.close()
        self.child.stderr.close()


def test_a_person_may_interrupt_an_answer_and_go_on(engine: ServedEngine) -> None:
    with Talker(engine) as talker:
        talker.await_text(b"> ")
        talker.type("hello\n")
        talker.await_text(b".")
        talker.child.send_signal(signal.SIGINT)
        talker.await_text(rb"interrupted; this turn is forgotten\]\n", stderr=True)
        await_load(engine, **IDLE)
        talker.type("/quit\n")
        assert talker.child.wait(DEADLINE_S) == 0


def test_a_chat_tells_when_other_weights_speak(engine: ServedEngine, model: Model) -> None:
    with Talker(engine, "--max-tokens", "4") as talker, WeightPublisher(engine.channel) as publisher:
        before = engine.control.status().version.encode()
        talker.await_text(rb"tiny, weights " + before, stderr=True)
        talker.await_text(b"> ")
        version = publisher.publish(model.weights, step=1).version
        engine.control.update(version)
        talker.type("hello\n")
        talker.await_text(rb"\[weights " + str(version).encode() + rb"\]\n", stderr=True)
        talker.type("/quit\n")
        assert talker.child.wait(DEADLINE_S) == 0


# --- updates under load ------------------------------------------------------------------------------

NUM_CLIENTS, NUM_UPDATES, NUM_TOKENS = 8, 30, 160


class Reader:
    """One client that asks again and again, and keeps what it was told: (prompt, tokens, versions, spans)."""

    def __init__(self, url: str, number: int, seen: dict[str, asyncio.Event]) -> None:
        self._url, self._number, self._seen = url, number, seen
        self.answers: list[tuple[list[int], list[int], list[str], list[dict[str, Any]]]] = []
        self.is_over = False

    async def read(self) -> None:
        async with AsyncOpenAI(base_url=f"{self._url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
            while not self.is_over:
                await self._ask(client)

    async def _ask(self, client: AsyncOpenAI) -> None:
        prompt = [self._number + 1, len(self.answers) % 250, 3, 4, 5][: 2 + self._number % 4]
        tokens: list[int] = []
        versions: list[str] = []
        stream = await client.completions.create(
            model="tiny", prompt=prompt, stream=True, max_tokens=NUM_TOKENS, temperature=0, extra_body=TOKENS
        )
        async for chunk in stream:
            more = chunk.choices[0].model_extra
            if "weight_version" in more:
                tokens += more["completion_token_ids"]
                versions.append(more["weight_version"])
                self._seen.setdefault(versions[-1], asyncio.Event()).set()
        self.answers.append((prompt, tokens, versions, more["weight_versions"]))


def test_under_thirty_updates_every_token_is_that_of_the_version_it_is_stamped_with(
    engine: ServedEngine, model: Model
) -> None:
    """Eight clients stream without a pause; each of the thirty versions is published, taken over and heard of before
    the next. Greedy tokens are compared one by one with what the numpy model of that version says after everything
    before them."""
    sets = [lively_weights(model.directory, seed) for seed in (1, 2, 3)]
    published: dict[str, Weights] = {}
    seen: dict[str, asyncio.Event] = {}
    readers = [Reader(engine.url, number, seen) for number in range(NUM_CLIENTS)]

    async def play(publisher: WeightPublisher, control: EngineController, pool: ThreadPoolExecutor) -> None:
        def update(step: int) -> str:
            version = publisher.publish(sets[step % len(sets)], step=step).version
            report = control.update(version)
            assert (report.outcome, report.version) == ("done", str(version))
            return str(version)

        reading = [asyncio.create_task(reader.read()) for reader in readers]
        for step in range(1, NUM_UPDATES + 1):
            version = await asyncio.get_running_loop().run_in_executor(pool, update, step)
            published[version] = sets[step % len(sets)]
            await asyncio.wait_for(seen.setdefault(version, asyncio.Event()).wait(), DEADLINE_S)
        for reader in readers:
            reader.is_over = True
        await asyncio.gather(*reading)

    before = engine.control.status().version
    with (
        WeightPublisher(engine.channel) as publisher,
        EngineController(engine.url) as control,
        ThreadPoolExecutor(1) as pool,
    ):
        asyncio.run(play(publisher, control, pool))
    published[before] = model.weights
    answers = [answer for reader in readers for answer in reader.answers]
    assert sum(len(tokens) for _, tokens, _, _ in answers) == len(answers) * NUM_TOKENS
    assert {version for _, _, versions, _ in answers for version in versions} >= set(published) - {before}
    assert sum(len(spans) - 1 for *_, spans in answers) >= NUM_UPDATES  # updates came in the middle of answers
    for prompt, tokens, versions, spans in answers:
        assert [span["version"] for span in spans for _ in range(span["start"], span["end"])] == versions
        assert wrong_tokens(prompt, tokens, versions, published) == []


def wrong_tokens(
    prompt: list[int], tokens: list[int], versions: list[str], published: dict[str, Weights]
) -> list[tuple[int, str]]:
    """(place, version) of each token that is not the likeliest of its version after all tokens before it."""
    places, stamps, wrong = np.arange(len(tokens)), np.array(versions), []
    for version in set(versions):
        values = numpy_llama.logits(SETTINGS, published[version], [*prompt, *tokens][:-1])[len(prompt) - 1 :]
        short = values.max(-1) - values[places, tokens]
        wrong += [(int(place), version) for place in places[(stamps == version) & (short > NOISE)]]
    return wrong
