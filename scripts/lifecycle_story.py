"""The engine's whole life on a real model: pause, sleep, wake, update, and answers that go on under new weights.

An engine of three workers is walked through it over HTTP while it answers; after each answer stand the versions that
made its tokens, after each promise a verdict. The exit code is 1 when a promise was not kept. Run it through
`scripts/lifecycle_demo`.
"""

import argparse
import itertools
import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np
from demo_parts import ANSWER_S, DemoError, Engine, Json, Teller
from rich.console import Console
from rich.table import Table

from fastdeploy_rl import EngineController, WeightPublisher
from fastdeploy_rl.engines.embedded.checkpoint import Checkpoint
from fastdeploy_rl.errors import ChecksumMismatchError, FastDeployRLError

RANKS = 3
QUESTION = "Tell me a short story about a robot who learns to paint."
NUM_TOKENS = 40
NUM_BEFORE = 12
"""Tokens of an answer that are there before anything happens to it."""
NUM_COMPARED = 12
WATCHED_S = 0.5
"""How long a paused engine is watched for tokens that must not come."""
FREED_SHARE = 0.9
NOISE, NOISE_VALUES = 0.02, 1_000_003
OUT_DIR = Path("build/lifecycle")
Weights = dict[str, np.ndarray]


class Answer(NamedTuple):
    text: str
    tokens: list[int]
    spans: list[Json]
    finish_reason: str
    prompt: list[int]


class Request:
    """The question, streamed by a thread of its own."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._events: list[Json] = []
        self._progress = threading.Condition()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        messages = [{"role": "user", "content": QUESTION}]
        options = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True}
        body = {"messages": messages, "stream": True} | options
        try:
            with httpx.stream("POST", f"{self._url}/v1/chat/completions", json=body, timeout=ANSWER_S) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        self._take(json.loads(line[6:]))
        except (httpx.HTTPError, DemoError) as error:
            with self._progress:
                self._failure = error
                self._progress.notify_all()

    def _take(self, event: Json) -> None:
        if "error" in event:
            raise DemoError(event["error"]["message"])
        with self._progress:
            self._events.append(event)
            self._progress.notify_all()

    @property
    def num_tokens(self) -> int:
        return len(self._tokens())

    @property
    def is_over(self) -> bool:
        return bool(self._events and self._events[-1]["choices"][0]["finish_reason"])

    def _tokens(self) -> list[int]:
        choices = [event["choices"][0] for event in self._events]
        return [token for choice in choices for token in choice.get("completion_token_ids", ())]

    def await_tokens(self, count: int) -> None:
        self._await(lambda: self.num_tokens >= count, f"{count} tokens")

    def answer(self) -> Answer:
        self._await(lambda: self.is_over, "the end of an answer")
        self._thread.join(ANSWER_S)
        choices = [event["choices"][0] for event in self._events]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        last = choices[-1]
        return Answer(text, self._tokens(), last["weight_versions"], last["finish_reason"], last["prompt_token_ids"])

    def _await(self, condition: Callable[[], bool], what: str) -> None:
        with self._progress:
            self._progress.wait_for(lambda: condition() or self._failure is not None, ANSWER_S)
            if not condition():
                raise DemoError(f"{what} did not come: {self._failure or 'nothing was heard'}")


@dataclass
class Story(Teller):
    """Everything the parts need, and what they found out."""

    engine: Engine
    control: EngineController
    publisher: WeightPublisher
    original: Weights
    undisturbed: Answer | None = None
    rows: list[tuple[str, list[int], list[int]]] = field(default_factory=list)
    steps: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def request(self) -> Request:
        """One that has begun."""
        request = Request(self.engine.url)
        request.await_tokens(NUM_BEFORE)
        return request

    def ask(self) -> Answer:
        return Request(self.engine.url).answer()

    def show(self, answer: Answer) -> None:
        spans = ", ".join(f"{span['version']} made {span['start']}..{span['end']}" for span in answer.spans)
        text = " ".join(answer.text.split())
        self.say(f"[dim]{text[:96]}{'...' if len(text) > 96 else ''}[/]")
        self.say(f"{len(answer.tokens)} tokens, finish_reason {answer.finish_reason}; {spans or 'no tokens'}")
        ends = [0, *(span["end"] for span in answer.spans)]
        if [span["start"] for span in answer.spans] != ends[:-1] or ends[-1] != len(answer.tokens):
            self.promise(False, "the spans add up to the tokens")

    def refusal(self) -> str:
        """What a new request is told now; DemoError where it is taken."""
        answer = self.engine.request("POST", "/v1/completions", json={"prompt": "Hello", "max_tokens": 1})
        if answer.status_code != 503:
            raise DemoError(f"a request got {answer.status_code} where 503 was due: {answer.text:.200}")
        return str(answer.json()["error"]["message"])

    def publish(self, weights: Weights) -> str:
        return str(self.publisher.publish(weights, step=next(self.steps), layout=f"tp:{RANKS}").version)

    def is_as_before(self, answer: Answer) -> bool:
        return self.undisturbed is not None and answer.tokens == self.undisturbed.tokens


def part_start(story: Story, ready: Json) -> None:
    story.console.rule("1  an engine of three workers", align="left")
    story.say(f"{ready['seconds']:.1f} s later it serves at {story.engine.url}")
    version = story.publish(story.original)
    story.control.update(version)
    story.say(f"its own weights, published as version {version}, are live")
    story.undisturbed = story.ask()
    story.show(story.undisturbed)


def part_pause(story: Story) -> None:
    story.console.rule("2  pause: keep, wait, abort", align="left")
    _pause_keep(story)
    _pause_wait(story)
    _pause_abort(story)


def _pause_keep(story: Story) -> None:
    request = story.request()
    report = story.control.pause("keep")
    time.sleep(WATCHED_S)  # what was on its way is there; then nothing may come
    before = request.num_tokens
    time.sleep(WATCHED_S)
    story.promise(
        request.num_tokens == before and not request.is_over and story.control.is_paused(),
        f"keep: {report.seconds * 1e3:.0f} ms later it stands still, after {before} of {NUM_TOKENS} tokens",
    )
    story.say(f"a new request gets 503: {story.refusal()}")
    story.control.resume()
    answer = request.answer()
    story.show(answer)
    story.promise(story.is_as_before(answer), "and goes on as if nothing had been")


def _pause_wait(story: Story) -> None:
    request = story.request()
    report = story.control.pause("wait")
    story.promise(
        story.is_as_before(request.answer()),
        f"wait: the answer came to its end first, {report.seconds:.2f} s",
    )
    story.control.resume()


def _pause_abort(story: Story) -> None:
    request = story.request()
    story.control.pause("abort")
    answer = request.answer()
    story.show(answer)
    so_far = story.undisturbed.tokens[: len(answer.tokens)] if story.undisturbed else []
    story.promise(
        answer.finish_reason == "abort" and 0 < len(answer.tokens) < NUM_TOKENS and answer.tokens == so_far,
        "abort: the answer ends with what it had, and says so",
    )
    story.control.resume()


SLEEPS: tuple[tuple[Sequence[str], int], ...] = (
    (("graph",), 1),
    (("kv_cache",), 1),
    (("weight",), 1),
    (("weight",), 2),
    (("weight", "kv_cache", "graph"), 1),
)


def part_sleep(story: Story) -> None:
    story.console.rule("3  sleep and wake: the memory comes and goes", align="left")
    for tags, level in SLEEPS:
        name = f"{', '.join(tags)}, level {level}" if "weight" in tags else ", ".join(tags)
        before = story.engine.memory()
        story.control.sleep(tags, level=level)
        after = story.engine.memory()
        story.rows.append((name, before, after))
        freed = [full - left for full, left in zip(before, after, strict=True)]
        due = [FREED_SHARE * size if "weight" in tags else 0 for size in story.engine.weight_bytes]
        story.promise(
            all(got >= least for got, least in zip(freed, due, strict=True)) and set(tags) == _asleep(story),
            f"{name}: {sum(freed) / 1e6:,.0f} MB less; a request gets 503: {story.refusal()}",
        )
        _wake(story, tags)
        story.promise(story.is_as_before(story.ask()), f"{name}: awake, and it answers as before")
    story.promise(_is_proved(story), "live memory, read again, is what was published")


def _is_proved(story: Story) -> bool:
    try:
        story.control.receipt(recompute=True)
    except ChecksumMismatchError as error:
        story.say(str(error))
        return False
    return True


def _asleep(story: Story) -> set[str]:
    return set(story.control.status().asleep)


def _wake(story: Story, tags: Sequence[str]) -> None:
    """One tag at a time; until the last one nothing is served."""
    for tag in tags[:-1]:
        story.control.wake([tag])
        story.refusal()
    story.control.wake(list(tags[-1:]))


def part_update(story: Story) -> None:
    story.console.rule("4  update: answers go on under new weights", align="left")
    old = story.control.status().version
    for number, kv in enumerate(("rebuild", "keep"), 1):
        new = story.publish(_changed(story.original, number))
        request = story.request()
        report = story.control.update(kv=kv, in_flight="keep")
        answer = request.answer()
        story.say(f"{kv}: version {report.version} came, {report.stall_seconds * 1e3:.1f} ms of it without decoding")
        story.show(answer)
        versions = [span["version"] for span in answer.spans]
        story.promise(
            versions == [old, new] and len(answer.tokens) == NUM_TOKENS,
            f"{kv}: the answer kept its tokens and went on; each of them says who made it",
        )
        fresh = _continue(story, answer.prompt + answer.tokens[: answer.spans[-1]["start"]])
        rest = answer.tokens[answer.spans[-1]["start"] :][:NUM_COMPARED]
        if kv == "rebuild":
            story.promise(
                fresh["choices"][0]["completion_token_ids"] == rest,
                f"{kv}: what followed is what the new weights make of everything before it",
            )
        else:
            cached = fresh["usage"]["prompt_tokens_details"]["cached_tokens"]
            story.promise(cached == 0, f"{kv}: a new request with the same tokens finds none of them in the cache")
        old = new


def _continue(story: Story, tokens: list[int]) -> Json:
    options = {"temperature": 0, "max_tokens": NUM_COMPARED, "ignore_eos": True, "return_token_ids": True}
    answer = story.engine.request("POST", "/v1/completions", json={"prompt": tokens} | options)
    if answer.is_error:
        raise DemoError(f"{answer.status_code}: {answer.text:.200}")
    body: Json = answer.json()
    return body


def _changed(weights: Weights, seed: int) -> Weights:
    """The same model a little beside itself: what a few steps of training might make of it."""
    noise = NOISE * np.random.default_rng(seed).standard_normal(NOISE_VALUES, np.float32)
    return {
        name: value if value.ndim == 1 else value + value.std() * np.resize(noise, value.shape)
        for name, value in weights.items()
    }


def part_newest(story: Story) -> None:
    story.console.rule("5  what was dropped wakes up on the newest version", align="left")
    story.control.sleep(level=2)
    version = story.publish(story.original)
    story.say(f"asleep: {', '.join(sorted(_asleep(story)))}; meanwhile version {version} is published")
    story.control.wake()
    answer = story.ask()
    story.show(answer)
    story.promise(
        [span["version"] for span in answer.spans] == [version] and story.is_as_before(answer),
        f"it serves version {version}, and answers as at first",
    )


def print_table(story: Story) -> None:
    table = Table(title="resident memory of the workers, MB", title_justify="left")
    table.add_column("asleep")
    for rank in range(RANKS):
        table.add_column(f"rank {rank}", justify="right")
    for name, before, after in story.rows:
        cells = (f"{full / 1e6:,.0f} -> {left / 1e6:,.0f}" for full, left in zip(before, after, strict=True))
        table.add_row(name, *cells)
    story.console.print(table)


def tell(console: Console, model_dir: Path) -> int:
    begun = time.monotonic()
    with Checkpoint.open(model_dir) as checkpoint:
        original = dict(checkpoint.tensors())
    with ExitStack() as stack:
        engine = Engine(model_dir, RANKS, OUT_DIR / "channel", _log_dir())
        stack.callback(engine.stop)
        publisher = stack.enter_context(WeightPublisher(OUT_DIR / "channel"))
        with console.status("starting the engine"):
            ready = engine.await_ready()
        control = stack.enter_context(EngineController(engine.url))
        story = Story(console, engine, control, publisher, original)
        part_start(story, ready)
        for part in (part_pause, part_sleep, part_update, part_newest):
            part(story)
    print_table(story)
    console.print(f"{time.monotonic() - begun:.0f} s")
    for text in story.broken_promises:
        console.print(f"[bold red]not kept:[/] {text}")
    return 1 if story.broken_promises else 0


def _log_dir() -> Path:
    directory = OUT_DIR / "log"
    directory.mkdir(parents=True)
    return directory


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/lifecycle_demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        type=Path,
        required=True,
        help="Hugging Face directory of the model; `scripts/lifecycle_demo` names scripts/make_model's",
    )
    options = parser.parse_args()
    shutil.rmtree(OUT_DIR, ignore_errors=True)
    OUT_DIR.mkdir(parents=True)
    console = Console(highlight=False)
    try:
        return tell(console, options.model)
    except (DemoError, FastDeployRLError) as error:
        console.print(f"[bold red]lifecycle_demo: error:[/] {type(error).__name__}: {error}")
        return 1
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130


if __name__ == "__main__":
    sys.exit(main())
