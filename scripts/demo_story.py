"""The demo: an engine of three workers takes a trainer's new weights over while it serves, told in five short parts.

Engine and trainer are processes of their own; every promise is checked on the way. Writes build/demo/summary.json;
the exit code is 1 when a promise was not kept. Run it through `scripts/demo`.
"""

import argparse
import json
import shutil
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo_parts import ANSWER_S, START_S, DemoError, Engine, Json, JsonProcess, Teller
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

RANKS = 3
CYCLES = 3
COLD_TOKENS = 64
CLEARED_SHARE = 0.9
OUT_DIR = Path("build/demo")
TAKEN_OVER = {
    "ipc": "every parameter is the published memory itself",
    "ipc_snapshot": "every parameter was copied once, out of the mapped files into the rank's own memory",
    "rsync": "every parameter lies where its bytes were received",
}
"""What an update does with the bytes, by load strategy."""


@dataclass
class Story(Teller):
    """Everything the parts need, and what they found out."""

    engine: Engine
    trainer: JsonProcess
    load_strategy: str
    question: str = ""
    max_steps: int = 0
    broken_names: list[str] = field(default_factory=list)
    rows: list[tuple[str, str, float, int, str]] = field(default_factory=list)
    summary: Json = field(default_factory=dict)

    def row(self, step: str, version: str, seconds: float, num_bytes: int, outcome: str) -> None:
        self.rows.append((step, version, seconds, num_bytes, outcome))

    def ask(self) -> str:
        """The question, and what the engine answers now."""
        answer = self.engine.chat(self.question)
        text: str = answer["choices"][0]["message"]["content"]
        versions = ", ".join(span["version"] for span in answer["weight_versions"])
        self.say(f"[bold]{self.question}[/]  {text}  [dim](tokens of version {versions})[/]")
        self.summary.setdefault("versions", [])
        for span in answer["weight_versions"]:
            if span["version"] not in self.summary["versions"]:
                self.summary["versions"].append(span["version"])
        return text


def part_start(story: Story) -> None:
    story.console.rule("1  an engine of three workers", align="left")
    with story.console.status("starting engine and trainer"):
        ready = story.engine.await_ready()
        hello = list(story.trainer.events("done", START_S))[-1]
    story.question, story.max_steps = hello["question"], hello["max_steps"]
    story.broken_names = hello["broken_names"]
    story.say(
        f"ready in {ready['seconds']:.1f} s at http://127.0.0.1:{story.engine.port}, board {story.engine.board_port}"
    )
    story.row("cold start", "0.0", ready["seconds"], sum(ready["weight_bytes"]), "serving")
    story.summary["weight_bytes"] = ready["weight_bytes"]
    story.summary["ranks"] = len(ready["weight_bytes"])
    story.summary["answer_before"] = story.ask()


def part_train(story: Story) -> Json:
    story.console.rule("2  a trainer fine-tunes and publishes", align="left")
    story.say("it teaches the model a wrong answer on purpose: so the change will show")
    losses = _train(story)
    story.summary["losses"] = losses
    story.promise(losses[-1] < losses[0], f"the loss falls: {', '.join(f'{loss:.3f}' for loss in losses)}")
    published = story.trainer.ask(do="publish")
    story.say(f"published version {published['version']}, cut for {RANKS} ranks, in {published['seconds']:.2f} s")
    _row_of_publication(story, published)
    return published


def _row_of_publication(story: Story, published: Json) -> None:
    story.row("publish", published["version"], published["seconds"], published["num_bytes"], "published")
    if seconds := published["snapshot_seconds"]:
        story.say(f"its snapshot was on disk {seconds:.2f} s later")
        story.row("snapshot", published["version"], seconds, published["num_bytes"], "on disk")


def _train(story: Story) -> list[float]:
    columns = TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=story.console, transient=True) as progress:
        task = progress.add_task("training", total=story.max_steps)
        story.trainer.send(do="train")
        losses = []
        for event in story.trainer.events("done", ANSWER_S * 2):
            if event["event"] == "step":
                losses.append(event["loss"])
                progress.update(task, completed=event["step"], description=f"training, loss {event['loss']:.3f}")
        return losses


def part_update(story: Story, published: Json) -> None:
    story.console.rule("3  all ranks take them over, or none", align="left")
    story.trainer.ask(do="trigger", port=story.engine.board_port, deadline_s=60)
    report = story.engine.weights("/report")
    aliased, copied = (sum(rank[name] for rank in report["ranks"]) for name in ("aliased_bytes", "copied_bytes"))
    story.summary |= {"aliased_bytes": aliased, "copied_bytes": copied}
    story.row("update", report["version"], report["seconds"], aliased + copied, report["outcome"])
    story.say(f"the trainer wrote the signal; {report['seconds']:.3f} s later all ranks were over, "
              f"{report['stall_seconds'] * 1e3:.1f} ms of it without decoding")  # fmt: skip
    expected, unexpected = (copied, aliased) if story.load_strategy == "ipc_snapshot" else (aliased, copied)
    story.promise(
        unexpected == 0 and expected > 0,
        f"{TAKEN_OVER[story.load_strategy]}: {aliased:,} bytes aliased, {copied:,} copied",
    )
    story.summary["answer_after"] = story.ask()
    story.promise(story.summary["answer_after"] != story.summary["answer_before"], "the answer changed")
    receipt = story.engine.weights("/receipt?recompute=true&deadline_s=60")
    matches = receipt["content_digest"] == published["content_digest"] and receipt["version"] == published["version"]
    story.summary["receipts_match"] = story.promise(
        matches, "the receipt adds up to what the trainer published, in live memory too"
    )
    story.summary["cold_tokens_match"] = story.promise(
        _cold_tokens(story) == _tokens(story.engine, story.question),
        f"a cold engine on the saved checkpoint gives the same {COLD_TOKENS} tokens",
    )


def _cold_tokens(story: Story) -> list[int]:
    directory = OUT_DIR / "checkpoint"
    story.trainer.ask(do="save", directory=str(directory))
    with ExitStack() as stack, story.console.status("starting a cold engine on the saved checkpoint"):
        cold = Engine(directory, RANKS, OUT_DIR / "cold-channel", _log_dir("cold"))
        stack.callback(cold.stop)
        cold.await_ready()
        stack.callback(shutil.rmtree, directory)  # half a gigabyte that nobody needs afterwards
        return _tokens(cold, story.question)


def _tokens(engine: Engine, question: str) -> list[int]:
    choice = engine.chat(question, COLD_TOKENS, ignore_eos=True)["choices"][0]
    tokens: list[int] = choice["completion_token_ids"]
    return tokens


def part_reject(story: Story) -> None:
    story.console.rule("4  a broken publication changes nothing", align="left")
    broken = story.trainer.ask(do="publish_broken")
    answer = story.engine.request("GET", "/update_model_weight")
    message = answer.json()["message"]
    for line in f"{answer.status_code}: {message}".splitlines():
        story.say(line)
    story.row("update", broken["version"], story.engine.weights("/report")["seconds"], 0, "rejected")
    named = [name for name in story.broken_names if name in message]
    story.promise(
        answer.status_code == 409 and named == story.broken_names,
        f"it is rejected, and both are named: {', '.join(named)}",
    )
    is_same = story.promise(story.ask() == story.summary["answer_after"], "the engine answers as before")
    story.summary["rejected_kept_answer"] = is_same and answer.status_code == 409


def part_clear(story: Story) -> None:
    story.console.rule("5  the memory comes and goes", align="left")
    cleared: list[list[int]] = []
    for cycle in range(CYCLES):
        before = story.engine.memory()
        report = story.engine.command("clear")
        after = story.engine.memory()
        cleared.append([full - empty for full, empty in zip(before, after, strict=True)])
        story.row("clear", "", report["seconds"], sum(cleared[-1]), report["outcome"])
        if cycle == 0:
            _check_refusal(story)
            good = story.trainer.ask(do="publish")  # the broken one is still the newest
            story.say(f"published the trainer's weights again, as version {good['version']}")
            _row_of_publication(story, good)
        report = story.engine.command("update")
        story.row("update", report["version"], report["seconds"], sum(story.engine.weight_bytes), report["outcome"])
    story.summary["cleared_bytes"] = cleared
    shares = [got / weights for ranks in cleared for got, weights in zip(ranks, story.engine.weight_bytes, strict=True)]
    story.promise(
        min(shares) >= CLEARED_SHARE,
        f"each clear gives every rank's memory back: {min(shares):.0%} of its weights' bytes at least, {CYCLES} times",
    )
    story.promise(story.ask() == story.summary["answer_after"], "it serves again")


def _check_refusal(story: Story) -> None:
    answer = story.engine.request("POST", "/v1/completions", json={"prompt": "Hello"})
    after = answer.headers.get("Retry-After", "")
    reason = answer.json().get("error", {}).get("message", "")
    story.promise(
        answer.status_code == 503 and after.isdigit(),
        f"requests meanwhile get {answer.status_code}, Retry-After {after}: {reason}",
    )


def print_table(story: Story) -> None:
    table = Table(title="what happened", title_justify="left")
    for name, justify in (
        ("step", "left"),
        ("version", "left"),
        ("seconds", "right"),
        ("bytes", "right"),
        ("outcome", "left"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for step, version, seconds, num_bytes, outcome in story.rows:
        table.add_row(step, version, f"{seconds:.3f}", f"{num_bytes:,}", outcome)
    story.console.print(table)


def _log_dir(name: str) -> Path:
    directory = OUT_DIR / "log" / name
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def tell(console: Console, model_dir: Path, load_strategy: str) -> int:
    begun = time.monotonic()
    with ExitStack() as stack:
        # Gigabytes that nobody needs afterwards.
        stack.callback(shutil.rmtree, OUT_DIR / "channel" / "snapshots", ignore_errors=True)
        engine = Engine(model_dir, RANKS, OUT_DIR / "channel", _log_dir("engine"), load_strategy)
        stack.callback(engine.stop)
        script = Path(__file__).with_name("demo_trainer.py")
        trainer = JsonProcess(
            [sys.executable, str(script), str(model_dir), str(OUT_DIR / "channel"), str(RANKS), load_strategy],
            OUT_DIR / "log" / "trainer",
        )
        stack.callback(trainer.stop)
        story = Story(console, engine, trainer, load_strategy, summary={"load_strategy": load_strategy})
        part_start(story)
        part_update(story, part_train(story))
        part_reject(story)
        part_clear(story)
    story.summary["seconds"] = time.monotonic() - begun
    print_table(story)
    _write_summary(story.summary)
    console.print(f"{story.summary['seconds']:.0f} s; summary in {OUT_DIR / 'summary.json'}")
    for text in story.broken_promises:
        console.print(f"[bold red]not kept:[/] {text}")
    return 1 if story.broken_promises else 0


def _write_summary(summary: dict[str, Any]) -> None:
    (OUT_DIR / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        type=Path,
        required=True,
        help="Hugging Face directory of the model; `scripts/demo` names scripts/make_model's",
    )
    parser.add_argument(
        "--load-strategy",
        choices=sorted(TAKEN_OVER),
        default="ipc",
        help="how weights get into the engine: shared memory, snapshot files or TCP",
    )
    options = parser.parse_args()
    shutil.rmtree(OUT_DIR, ignore_errors=True)
    OUT_DIR.mkdir(parents=True)
    console = Console(highlight=False)
    try:
        return tell(console, options.model, options.load_strategy)
    except DemoError as error:
        console.print(f"[bold red]demo: error:[/] {error}")
        return 1
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130


if __name__ == "__main__":
    sys.exit(main())
