"""A stand-in for engine, tokenizer and board behind the HTTP face: tokens are the bytes of the text."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from fastdeploy_rl.config import KEEP
from fastdeploy_rl.control.completions import CompletionService
from fastdeploy_rl.control.generation import (
    EngineLoad,
    GeneratedToken,
    GenerationDefaults,
    GenerationRequest,
    NextToken,
)
from fastdeploy_rl.control.http_app import EngineFace
from fastdeploy_rl.control.metrics import EngineMetrics
from fastdeploy_rl.control.weights_service import WeightsService
from fastdeploy_rl.errors import FastDeployRLError, OverloadedError
from fastdeploy_rl.lifecycle import Tag
from fastdeploy_rl.receipt import Receipt
from fastdeploy_rl.report import CommandKind, EngineStatus, RankReport, RankStatus, StepReport, UpdateReport
from fastdeploy_rl.update.client_commands import ClientCommand

END = 0
MODEL = "bytes"
NEUTRAL = GenerationDefaults()
RECEIPT = Receipt(version="1.2", source="ipc", content_digest="c0", read={"w": "00"}, live={"w": ["00", "00"]})


class ByteTokenizer:
    eos_token_ids: Sequence[int] = (END,)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def apply_chat_template(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return self.encode("".join(f"<{message['role']}>{message['content']}" for message in messages))

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in token_ids if token != END).decode(errors="replace")


class ScriptedEngine:
    """Answers every request with `answer`, token by token, the requests of one generation in turn; from token
    `switch_at` on by version 1.2 instead of 1.1."""

    max_model_len = 64
    vocab_size = 256
    max_requests = 6
    load = EngineLoad(1, 2, 3, 10, 4, 5, 6, 7, 8)

    def check_admitting(self) -> None:
        """It always does."""

    def __init__(self, answer: bytes = b"Paris\0", switch_at: int = 3) -> None:
        self.answer = answer
        self.switch_at = switch_at
        self.requests: list[GenerationRequest] = []
        self.generations: list[ScriptedGeneration] = []

    def start(self, requests: Sequence[GenerationRequest]) -> "ScriptedGeneration":
        self.requests += requests
        self.generations.append(ScriptedGeneration([self.script(request) for request in requests]))
        return self.generations[-1]

    def script(self, request: GenerationRequest) -> Iterator[GeneratedToken]:
        for index, token_id in enumerate(self.answer[: request.max_tokens]):
            is_end = token_id == END and not request.ignore_eos
            reason = "stop" if is_end else "length" if index + 1 == request.max_tokens else ""
            version = "1.2" if index >= self.switch_at else "1.1"
            yield token(request, token_id, version, reason)
            if reason:
                return


def token(request: GenerationRequest, token_id: int, version: str, reason: str = "") -> GeneratedToken:
    """Its logarithms, where they are asked for, are -0.5 for the chosen one, then -0.5, -1.5, ... for the likeliest."""
    if request.num_logprobs is None:
        return GeneratedToken(token_id, version, finish_reason=reason)
    top = tuple((token_id + place, -0.5 - place) for place in range(request.num_logprobs))
    return GeneratedToken(token_id, version, -0.5, reason, top_logprobs=top)


class ScriptedGeneration:
    """Scripts in turn, one token of each. `cancelled`: indices whose rest nobody wanted."""

    def __init__(self, scripts: Sequence[Iterator[GeneratedToken]]) -> None:
        self._live = dict(enumerate(scripts))
        self._turns = list(self._live)
        self.cancelled: list[int] = []
        self.is_closed = False

    def __aiter__(self) -> "ScriptedGeneration":
        return self

    async def __anext__(self) -> NextToken:
        while self._turns:
            index = self._turns.pop(0)
            made = next(self._live[index], None) if index in self._live else None
            if made is not None:
                if made.finish_reason:
                    del self._live[index]
                else:
                    self._turns.append(index)
                return NextToken(index, made)
        raise StopAsyncIteration

    def cancel(self, index: int) -> None:
        if self._live.pop(index, None) is not None:
            self.cancelled.append(index)

    def close(self) -> None:
        for index in list(self._live):
            self.cancel(index)
        self.is_closed = True


class AbortingEngine(ScriptedEngine):
    """Ends every request after `switch_at` tokens, as a clear does."""

    def script(self, request: GenerationRequest) -> Iterator[GeneratedToken]:
        for token_id in self.answer[: self.switch_at]:
            yield token(request, token_id, "1.1")
        yield GeneratedToken(-1, "", None, "abort", "weights were cleared")


class PausingEngine(ScriptedEngine):
    """Ends every request in order after `switch_at` tokens, as a pause does."""

    def script(self, request: GenerationRequest) -> Iterator[GeneratedToken]:
        for token_id in self.answer[: self.switch_at]:
            yield token(request, token_id, "1.1")
        yield GeneratedToken(-1, "", finish_reason="abort", abort_reason="the engine was paused")


class CachingEngine(ScriptedEngine):
    """Has some of each prompt in its prefix cache: one token of the first request, two of the second, ..."""

    def script(self, request: GenerationRequest) -> Iterator[GeneratedToken]:
        number = self.requests.index(request) + 1
        for index, made in enumerate(super().script(request)):
            yield msgspec.structs.replace(made, num_cached=0 if index else number)


class FullEngine(ScriptedEngine):
    """Has no room."""

    def start(self, requests: Sequence[GenerationRequest]) -> ScriptedGeneration:
        raise OverloadedError("6 requests are running or waiting; try again later")


class ScriptedBoard:
    """A board whose commands end as `outcome` says, and those of a kind in `refused` as that does; `gate` holds them
    back while it is unset. It keeps account of who paused it and of what sleeps; an update changes nothing."""

    def __init__(self) -> None:
        self.legacy_status = "NORMAL"
        self.reason = ""
        self.outcome: FastDeployRLError | None = None
        self.refused: dict[str, FastDeployRLError] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Event()
        self.calls: list[tuple[object, ...]] = []
        self.is_paused = False
        self.asleep: dict[Tag, str] = {}
        self.phase = "idle"
        self.source, self.newest_version = "ipc", "1.1"

    def status(self) -> EngineStatus:
        is_live = self.legacy_status == "NORMAL"
        is_serving = is_live and not self.is_paused and not self.asleep
        away = "it is paused" if self.is_paused else f"{', '.join(tag.value for tag in self.asleep)} asleep"
        return EngineStatus(
            port=8182,
            admission="serving" if is_serving else "paused",
            update=self.phase,
            version="1.1" if is_live else "",
            content_digest="c0",
            legacy_status=self.legacy_status,
            is_serving=is_serving,
            reason="" if is_serving else self.reason or (away if is_live else "the engine is cleared"),
            commands_done=len(self.calls),
            ranks=[
                RankStatus(rank=0, pid=1, phase="idle", command=0, version="1.1", heartbeat_age_s=0.1),
                RankStatus(rank=1, pid=0, phase="starting", command=0, version="", heartbeat_age_s=None),
            ],
            residency={tag.value: self.asleep.get(tag, "resident") for tag in Tag},
            asleep=[tag.value for tag in self.asleep],
            is_paused=self.is_paused,
            live_since="2026-11-30T23:59:59.000Z",
            source=self.source,
            apply_mode="alias",
            receipt_digest="c0",
            newest_version=self.newest_version,
        )

    def carry_out(self, command: ClientCommand) -> UpdateReport:
        """What is asked for stands in `calls`: the kind, its words, the deadline, and what else an update was told."""
        made = self._command(command.kind.name.lower(), *_words(command))
        tags = command.options.tags
        if command.kind in (CommandKind.PAUSE, CommandKind.RESUME):
            self.is_paused = command.kind is CommandKind.PAUSE
        elif command.kind is CommandKind.SLEEP:
            is_kept = command.options.level == 1
            places = {tag: "offloaded" if is_kept and tag is Tag.WEIGHT else "dropped" for tag in tags}
            self.asleep = {tag: (self.asleep | places)[tag] for tag in Tag if tag in self.asleep or tag in tags}
        elif command.kind is CommandKind.WAKE:
            self.asleep = {tag: place for tag, place in self.asleep.items() if tag not in tags}
            self.is_paused = self.is_paused and bool(self.asleep)
        return made

    def receipt(self, *, recompute: bool = False, deadline_s: float) -> Receipt:
        self._command("receipt", recompute, deadline_s)
        return RECEIPT

    def read_report(self, command: int) -> UpdateReport:
        return report(command, self.calls[command - 1][0])

    @contextmanager
    def open_client(self) -> Iterator["ScriptedBoard"]:
        yield self

    def _command(self, kind: str, *arguments: object) -> UpdateReport:
        self.calls.append((kind, *arguments))
        self.begun.set()
        self.gate.wait(timeout=20)
        outcome = self.refused.get(kind, self.outcome)
        if outcome is not None:
            raise outcome
        return report(len(self.calls), kind)


def _words(command: ClientCommand) -> list[object]:
    options = command.options
    tags = ",".join(tag.value for tag in Tag if tag in options.tags)
    ends = [options.in_flight, options.on_timeout]
    extra = ["force"] * command.is_forced + ([f"kv {options.kv}"] if options.kv else [])
    extra += [options.in_flight] if options.in_flight != KEEP else []
    words: dict[CommandKind, list[object]] = {
        CommandKind.UPDATE: [command.version or None],
        CommandKind.PAUSE: ends,
        CommandKind.SLEEP: [tags, options.level, *ends],
        CommandKind.WAKE: [tags, options.kv],
    }
    return [*words.get(command.kind, []), command.deadline_s, *(extra if command.kind is CommandKind.UPDATE else [])]


def report(command: int, kind: object) -> UpdateReport:
    rank = RankReport(
        rank=0, steps=[StepReport("install", 0.01, 5)], apply_mode="alias", aliased_bytes=5, graphs_captured=2
    )
    return UpdateReport(command, str(kind), "done", "1.2", "1.1", 0.2, 0.1, [rank])


def make_face(
    engine: ScriptedEngine, board: ScriptedBoard, defaults: GenerationDefaults = NEUTRAL, *, has_checksums: bool = True
) -> EngineFace:
    metrics = EngineMetrics()
    completions = CompletionService(engine, ByteTokenizer(), metrics, MODEL, defaults)
    return EngineFace(completions, WeightsService(board, has_checksums=has_checksums), metrics)
