"""What `serve` says at its start: for people, for programs and in the log."""

import json
import logging
from pathlib import Path

import msgspec
import pytest
from served_model import write_tiny_llama

from fastdeploy_rl.board.board import Leftovers
from fastdeploy_rl.cli import main, serve
from fastdeploy_rl.cli.serve import StartSummary, summarize
from fastdeploy_rl.control.http_address import HttpAccess
from fastdeploy_rl.engines.embedded import supervisor
from fastdeploy_rl.engines.embedded.messages import Ready
from fastdeploy_rl.engines.embedded.supervisor import CheckedModel, ServeConfig, check_model
from fastdeploy_rl.memory.owner_lock import Owner

DEAD = Leftovers(Owner(4711, 0.0), ("fastdeploy_rl_board.8182", "kv_cache_status.8182"))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def config(model_dir: Path, tmp_path: Path) -> ServeConfig:
    return ServeConfig(model_dir=model_dir, num_ranks=2, channel=tmp_path / "channel", log_dir=tmp_path, max_num_seqs=3)


@pytest.fixture
def model(config: ServeConfig) -> CheckedModel:
    return check_model(config)


@pytest.fixture
def quiet_logging(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The announcers' log file, without a handler that would outlive the test."""
    opened: list[Path] = []
    monkeypatch.setattr(serve, "_log_to_file", opened.append)
    return opened


def test_the_summary_counts_the_memory_of_a_rank(config: ServeConfig, model: CheckedModel) -> None:
    summary = summarize(config, model, None)
    sizes = model.config
    pages = 3 * -(-256 // 16)  # three requests of the longest kind, in pages of 16 tokens
    values = sizes.num_hidden_layers * 2 * sizes.num_key_value_heads // 2 * pages * 16 * sizes.head_dim
    assert summary.kv_cache_bytes == values * 4
    assert summary.weight_bytes == model.weight_bytes(2)
    assert summary.shm_free_bytes > 0
    assert (summary.ranks, summary.max_num_seqs, summary.max_model_len) == (2, 3, 256)
    assert (summary.load_strategy, summary.apply_mode, summary.port) == ("ipc", "auto", 8182)


def test_people_read_one_block_with_all_of_it(
    config: ServeConfig, model: CheckedModel, quiet_logging: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    serve._TextAnnouncer(config.board_port).starting(config, model, DEAD)
    text = capsys.readouterr().out
    for words in (str(config.model_dir), "ipc, apply mode auto", str(config.channel), "http://127.0.0.1:8180", "8182"):
        assert words in text
    for words in (
        "3 at once, 256 tokens each",
        "of weights, up to",
        "of KV cache",
        "free",
        "serverlog",
        "death: restart",
    ):
        assert words in text
    assert "of a dead engine (pid 4711" in text
    assert "fastdeploy_rl_board.8182" in text
    assert quiet_logging == [config.log_dir]


def test_nothing_is_said_of_leftovers_where_there_were_none(
    config: ServeConfig, model: CheckedModel, quiet_logging: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    serve._TextAnnouncer(config.board_port).starting(config, model, None)
    assert "reclaimed" not in capsys.readouterr().out


def test_programs_read_one_document_with_every_field(
    config: ServeConfig, model: CheckedModel, quiet_logging: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    serve._JsonAnnouncer().starting(config, model, DEAD)
    (line,) = capsys.readouterr().out.splitlines()
    told = json.loads(line)
    assert told["event"] == "starting"
    assert set(StartSummary.__struct_fields__) < set(told)
    assert "pid 4711" in told["reclaimed"]


@pytest.mark.parametrize(("flags", "policy"), [((), "restart"), (("--on-worker-death", "stop"), "stop")])
def test_the_command_line_says_what_follows_a_death(
    flags: tuple[str, ...], policy: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[ServeConfig] = []
    monkeypatch.setattr(supervisor, "serve", lambda config, announcer: asked.append(config))
    assert main(["serve", "--model", str(model_dir), "--json", *flags]) == 0
    assert [config.on_worker_death for config in asked] == [policy]


def test_lost_and_returned_workers_are_told_to_people_and_to_programs(capsys: pytest.CaptureFixture[str]) -> None:
    for announcer in (serve._TextAnnouncer(8182), serve._JsonAnnouncer()):
        announcer.rank_lost(1, "rank 1 (pid 7) was killed by SIGKILL; see log/workerlog.1")
        announcer.rank_back(Ready(1, 0, 2.5))
    lost, back, *documents = capsys.readouterr().out.splitlines()
    assert lost == "lost rank 1 (pid 7) was killed by SIGKILL; see log/workerlog.1; starting rank 1 again"
    assert back == "rank 1 is back after 2.5 s"
    assert [json.loads(line)["event"] for line in documents] == ["rank_lost", "rank_back"]


@pytest.mark.parametrize("access", HttpAccess)
def test_people_read_of_every_kind_of_access_who_has_it(
    config: ServeConfig, model: CheckedModel, access: HttpAccess
) -> None:
    """The verb keeps words for the values of an enum that it does not import."""
    summary = msgspec.structs.replace(summarize(config, model, None), http_access=access.value)
    line = str(serve.summary_lines(summary)["http"])
    assert line.startswith(f"{summary.url}, ")
    assert serve._ACCESS_TEXTS.keys() == {kind.value for kind in HttpAccess}


def test_the_log_has_the_same_in_one_line(
    config: ServeConfig, model: CheckedModel, quiet_logging: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger=serve.__name__):
        serve._JsonAnnouncer().starting(config, model, DEAD)
    (message,) = caplog.messages
    assert message.startswith("event=starting model=")
    assert "\n" not in message
    assert [name for name in StartSummary.__struct_fields__ if f" {name}=" not in message] == []
