"""The command line: what it accepts, how it refuses, and that asking for help is cheap."""

import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastdeploy_rl.cli import chat, dispatch, generate, main
from fastdeploy_rl.cli.dispatch import make_parser
from fastdeploy_rl.cli.options import engine_address, one_line, port, positive, seconds
from fastdeploy_rl.control.openai_schema import MAX_BODY_BYTES
from fastdeploy_rl.errors import NotServingError

VERBS = [verb.__name__.rpartition(".")[2].replace("_", "-") for verb in dispatch.VERBS]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and complaint of one call."""
    try:
        code = main(arguments)
    except SystemExit as left:
        code = int(left.code or 0)
    output = capsys.readouterr()
    return code, output.out, output.err


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself_with_examples(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    code, text, _ = run(capsys, verb, "--help")
    assert code == 0
    assert f"  fastdeploy-rl {verb}" in text.partition("examples:")[2]
    assert "--json" in text


def test_help_lists_all_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = run(capsys, "--help")
    assert code == 0
    assert [verb for verb in VERBS if verb not in text] == []
    assert run(capsys) == (2, "", text)


def test_a_package_without_its_native_core_says_so_and_what_to_do() -> None:
    probe = "import sys; sys.modules['fastdeploy_rl._native'] = None; from fastdeploy_rl import WeightPublisher"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, check=False, timeout=60)
    assert "ImportError: the native core is not built for this Python" in done.stderr.decode().splitlines()[-1]


@pytest.mark.parametrize(
    ("package", "verb", "mend"),
    [
        ("uvicorn", "serve --model nowhere", "pip install '/path/to/fastdeploy_rl[engine,cpu]'"),
        ("httpx", "generate --prompt a --engine http://127.0.0.1:9", "this verb needs it: pip install httpx"),
        ("httpx", "chat --engine http://127.0.0.1:9", "this verb needs it: pip install httpx"),
    ],
)
def test_what_a_trainers_environment_lacks_is_named_with_its_mend(package: str, verb: str, mend: str) -> None:
    probe = f"import sys; sys.modules[{package!r}] = None; from fastdeploy_rl.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", probe, *verb.split()], capture_output=True, check=False, timeout=60)
    assert done.returncode == 2
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith(f"fastdeploy-rl: error: {package} is not installed for ")
    assert mend in line


def test_help_imports_neither_engine_nor_server() -> None:
    probe = (
        "import sys; from fastdeploy_rl.cli import main\n"
        "try: main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = [name for name in ('paddle', 'numpy', 'fastapi', 'uvicorn', 'httpx') if name in sys.modules]\n"
        "print(heavy, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, check=True, timeout=60)
    assert done.stderr.decode().strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--model", "x", "--no-checksums", "--apply-mode", "copy"], "which takes checksums to undo"),
        (["serve", "--model", "x", "--rsync-config", '{"adress": "a:1"}'], "adress"),
        (
            ["serve", "--model", "x", "--load-strategy", "rsync", "--rsync-config", '{"secret_file": "/no/secret"}'],
            "secret file /no/secret: No such file or directory; server and engines need the same one",
        ),
        (["serve", "--model", "x", "--load-strategy", "carrier-pigeon"], "unknown load strategy 'carrier-pigeon'"),
        (["serve", "--model", "/no/such/model"], "no such model directory: /no/such/model"),
        (["publish", "/no/such/model", "--step", "1"], "no such model directory: /no/such/model"),
        (["status", "--engine", "1"], "no engine at port 1"),
        (["status", "--engine", "http://127.0.0.1:1"], "no engine at http://127.0.0.1:1"),
        (["generate", "--engine", "1", "--prompt", "x"], "no engine at port 1"),
        (
            ["generate", "--engine", "http://127.0.0.1:1", "--prompt", "x", "--stream"],
            "no engine at http://127.0.0.1:1",
        ),
        (["chat", "--engine", "http://127.0.0.1:1"], "no engine at http://127.0.0.1:1"),
        (["status", "--engine", "http://[::1"], "not an engine's URL: 'http://[::1'"),
        (["retire", "--ipc-dir", "/no/such/channel"], "no channel at /no/such/channel"),
        (["serve-weights", "--mooncake-host", "10.0.0.7"], "need --mooncake tcp or --mooncake rdma"),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, text, complaint = run(capsys, *arguments)
    assert (code, text) == (2, "")
    assert complaint.startswith("fastdeploy-rl: error: ")
    assert complaint.count("\n") == 1
    assert words in complaint


def test_a_prompt_beyond_what_an_engine_takes_is_refused_before_it_is_sent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(bytes(MAX_BODY_BYTES + 1))))
    code, text, complaint = run(capsys, "generate", "--prompt", "-", "--engine", "1")
    assert (code, text) == (2, "")
    assert f"larger than {MAX_BODY_BYTES} bytes" in complaint


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["serve"],
        ["serve", "--model", "x", "--port", "99999"],
        ["serve", "--model", "x", "--tensor-parallel-size", "0"],
        ["serve", "--model", "x", "--apply-mode", "guess"],
        ["serve", "--mod", "x"],
        ["publish", "x"],
        ["publish", "x", "--step", "-1"],
        ["update", "--deadline", "0"],
        ["update", "--deadline", "nan"],
        ["status", "--engine", "host:80"],
        ["generate"],
        ["generate", "--prompt", "x", "--temperature", "nan"],
        ["generate", "--prompt", "\udcff"],
        ["chat", "--max-tokens", "0"],
    ],
)
def test_wrong_usage_is_exit_code_2(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    code, text, complaint = run(capsys, *arguments)
    assert (code, text) == (2, "")
    assert "usage: fastdeploy-rl" in complaint


def test_fastdeploys_spelling_is_taken() -> None:
    words = (
        "--model m --tensor-parallel-size 2 --load-strategy ipc --dynamic-load-weight --ipc-dir c --host h --port 81"
    )
    words += " --rollback refetch"
    words += " --engine-worker-queue-port 82 --apply-mode copy --max-num-seqs 3 --max-model-len 99 --log-dir l"
    options = make_parser().parse_args(["serve", *words.split()])
    assert (options.tensor_parallel_size, options.port, options.engine_worker_queue_port) == (2, 81, 82)
    assert (options.ipc_dir, options.log_dir) == (Path("c"), Path("l"))
    assert (options.apply_mode, options.rollback) == ("copy", "refetch")


def test_several_lines_become_one_whose_items_stay_apart() -> None:
    assert one_line("2 problems:\na: missing\n  b: shape [1]\n") == "2 problems: a: missing; b: shape [1]"
    assert one_line("it ended.\n\nsee  the\tlog") == "it ended. see the log"
    assert one_line("\n") == ""


class BreakingClient:
    """Says one piece, then that its engine is gone."""

    def stream(self, route: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield {"choices": [{"text": "Once", "delta": {"content": "Once"}}]}
        raise NotServingError("rank 0 died")


def test_a_complaint_after_streamed_text_gets_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    client: Any = BreakingClient()
    with pytest.raises(NotServingError):
        generate._stream(client, {}, as_json=False)
    assert capsys.readouterr().out == "Once\n"
    options: Any = SimpleNamespace(json=False)
    with pytest.raises(NotServingError):
        chat._Conversation(client, options)._answer({})
    assert capsys.readouterr().out == "Once\n"


def test_addresses_and_numbers() -> None:
    assert engine_address("8182") == 8182
    assert engine_address("http://127.0.0.1:8180") == "http://127.0.0.1:8180"
    assert (port("65535"), positive("7"), seconds("0.5")) == (65535, 7, 0.5)
