"""The faults of FastDeploy's own weight manager, shown on its code, and shown not to be ours, in the same scenes.

Writes build/fastdeploy_faults.md: each row is told from what was seen in this run; a row whose test did not run, or did
not hold, says so."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fastdeploy_rl.testing.fake_cuda import FakeCuda
from tests.engines.fastdeploy.real_tree import ROOT, RealPeer, skip_without_real_tree
from tests.process.numpy_engine import free_port

skip_without_real_tree()

NORMAL, UPDATING, CLEARING, CLEARED = 0, 1, -1, -2
WORDS = {0: "NORMAL", 1: "UPDATING", -1: "CLEARING", -2: "CLEARED"}
TABLE = ROOT / "build" / "fastdeploy_faults.md"
OLD = {"a.weight": 1.0, "a.bias": 1.0, "b.weight": 1.0, "b.bias": 1.0}
NEW = {"a.weight": 2.0, "a.bias": 2.0, "b.weight": 2.0, "b.bias": 2.0}
GONE = dict.fromkeys(OLD)

FAULTS = {
    "1": "A bad tensor leaves those before it replaced",
    "2": "Missing names stay on old weights, unknown ones are skipped, in silence",
    "3a": "An exception ends the worker and leaves the word as it is",
    "3b": "The other ranks wait for one that failed, without a limit",
    "4": "The word is read and written back: a request in between is lost",
    "5": "CLEARED is published before the KV cache is freed",
    "6": "A file in a shared directory is executed",
    "7a": "Files of another time are taken over",
    "7b": "A byte that flipped is served",
    "7c": "What the trainer writes later shows while tokens are made",
    "8a": "`rsync` cannot wake up weights that slept",
    "8b": "A sleep of two tags ends early where the first one sleeps already",
    "8c": "A sleep of the KV cache leaves graphs on its old addresses",
    "9a": "An update that was given up goes live later",
    "9b": "Torn weights are decoded with",
    "10": "`rsync` holds a whole state dict beside the model",
    "11": "Main and MTP parameters of one name overwrite each other",
    "12a": "A device that is named by its UUID ends the start",
    "12b": "A signal that is made anew is never looked at",
}


class Row(NamedTuple):
    stock: str
    ours: str
    how: str


class Table:
    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}

    def write(self) -> None:
        lines = [
            "# FastDeploy's faults, on its own code and on ours",
            "",
            "Written by tests/engines/fastdeploy/test_real_faults.py from what it saw.",
            "",
            "| | fault | stock FastDeploy here | with fastdeploy_rl here | how |",
            "| --- | --- | --- | --- | --- |",
        ]
        for number, fault in FAULTS.items():
            row = self.rows.get(number, Row("not shown in this run", "not shown in this run", ""))
            lines.append(f"| {number} | {fault} | {row.stock} | {row.ours} | {row.how} |")
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    table = Table()
    yield table
    table.write()


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RealPeer]]:
    with (
        FakeCuda() as cuda,
        RealPeer(tmp_path_factory.mktemp("stock")) as stock,
        RealPeer(tmp_path_factory.mktemp("ours"), FD_PLUGINS="fastdeploy_rl", **cuda.environ) as ours,
    ):
        yield {"stock": stock, "ours": ours}


Play = Callable[[str], tuple[dict[str, Any], dict[str, Any]]]


@pytest.fixture
def play(peers: dict[str, RealPeer], tmp_path: Path) -> Play:
    """A scene on stock, then on ours."""

    def both(scene: str) -> tuple[dict[str, Any], dict[str, Any]]:
        seen = [
            peer.call(f"real_faults.{scene}", kind=kind, path=str(tmp_path / kind), port=free_port())
            for kind, peer in peers.items()
        ]
        return seen[0], seen[1]

    return both


def told(facts: dict[str, Any]) -> str:
    """Word, loop and weights, in words."""
    text = (
        f"word {WORDS[facts['word']]}, loop {'runs' if facts['loop'] == 'runs' else 'ended: ' + short(facts['loop'])}"
    )
    text += f", parameters {values(facts['values'])}"
    return text + (f"; told: {short(facts['reason'])}" if facts["reason"] else "")


def values(found: dict[str, float | None]) -> str:
    if found == GONE:
        return "freed"
    kinds = {1.0: "old", 2.0: "new"}
    if len(set(found.values())) == 1:
        return f"all {kinds.get(found['a.weight'], found['a.weight'])}"
    return ", ".join(f"`{name}` {kinds.get(value, value)}" for name, value in found.items())


def short(text: str) -> str:
    """In a cell of the table; paths differ from run to run."""
    words = [Path(word).name if word.startswith("/") else word for word in text.split()]
    return " ".join(words).replace("|", "\\|")[:240]


LOOP = "real event_loop_normal, GPUModelRunner and IPCSignal; the trainer writes 1 into the word"


def test_a_bad_tensor_changes_nothing(play: Play, table: Table) -> None:
    stock, ours = play("second_tensor_has_another_shape")
    assert stock["values"] == NEW | {"b.weight": 1.0}
    assert (ours["word"], ours["loop"], ours["values"]) == (NORMAL, "runs", OLD)
    assert "b.weight" in ours["reason"]
    table.rows["1"] = Row(told(stock), told(ours), f"{LOOP}; `b.weight` of the snapshot has another shape")


def test_missing_and_unknown_names_stop_an_update(play: Play, table: Table) -> None:
    stock, ours = play("names_are_missing_or_unknown")
    assert (stock["word"], stock["values"]) == (NORMAL, NEW | {"b.weight": 1.0})
    assert (ours["word"], ours["loop"], ours["values"]) == (NORMAL, "runs", OLD)
    assert "b.weight" in ours["reason"] or "c.weight" in ours["reason"]
    table.rows["2"] = Row(told(stock), told(ours), f"{LOOP}; the snapshot lacks `b.weight` and has a `c.weight`")


def test_a_failed_load_leaves_worker_and_word_alive(play: Play, table: Table) -> None:
    stock, ours = play("nothing_is_there_to_load")
    assert stock["word"] == UPDATING
    assert "FileNotFoundError" in stock["loop"]
    assert not stock["decodes"]
    assert (ours["word"], ours["loop"], ours["values"]) == (NORMAL, "runs", OLD)
    assert ours["decodes"]
    table.rows["3a"] = Row(told(stock), told(ours), f"{LOOP}; the snapshot's file is gone")


def test_no_rank_waits_for_one_that_failed(play: Play, table: Table) -> None:
    stock, ours = play("one_of_two_ranks_has_nothing_to_load")
    assert "FileNotFoundError" in stock["rank 1"]
    assert (stock["word"], stock["decodes"]) == (UPDATING, False)
    assert stock["rank 0 values"] != stock["rank 1 values"]
    assert (ours["word"], ours["loop"], ours["rank 1"]) == (NORMAL, "runs", "runs")
    assert ours["decodes"]
    assert ours["rank 0 values"] == ours["rank 1 values"] == OLD
    ranks = "rank 0 {}, rank 1 {}"
    table.rows["3b"] = Row(
        f"word {WORDS[stock['word']]}, rank 1 ended: {short(stock['rank 1'])}; rank 0 decodes no more; parameters "
        + ranks.format(values(stock["rank 0 values"]), values(stock["rank 1 values"])),
        f"word {WORDS[ours['word']]}, both ranks decode; parameters "
        + ranks.format(values(ours["rank 0 values"]), values(ours["rank 1 values"])),
        "two ranks as threads over the real loop; broadcast and barrier are Python's, likewise without a limit; the "
        "file of rank 1 is gone",
    )


def test_a_request_between_read_and_write_back(
    play: Play, table: Table, peers: dict[str, RealPeer], tmp_path: Path
) -> None:
    """FastDeploy's loop writes back, under whichever runner; only what is asked for over the board is safe from it."""
    stock, ours = play("trainer_writes_between_read_and_write_back")
    assert (stock["word"], stock["values"]) == (CLEARED, GONE)
    assert (ours["word"], ours["values"]) in [(NORMAL, NEW), (CLEARED, GONE)]
    path = str(tmp_path / "board")
    over_board = peers["ours"].call("real_faults.controller_asks_meanwhile", path=path, port=free_port())
    assert over_board["outcome"] == "done" or over_board["outcome"].startswith("refused: ")
    lost = "the UPDATING is {}"
    table.rows["4"] = Row(
        f"{told(stock)}: {lost.format('lost' if stock['word'] == CLEARED else 'seen')}",
        f"over the word: {told(ours)}: {lost.format('lost' if ours['word'] == CLEARED else 'seen')}; what an "
        f"EngineController asks for at that moment, over the board: {short(over_board['outcome'])}",
        "real event_loop_normal; a trainer that has asked for CLEARING writes UPDATING after the loop's read and "
        "before its write back, which is FastDeploy's under our runner too",
    )


def test_cleared_means_that_the_cache_is_freed(play: Play, table: Table) -> None:
    stock, ours = play("engine_is_cleared")
    before = "word when the cache was freed"
    assert stock[before] == CLEARED
    assert ours[before] != CLEARED
    assert (ours["word"], ours["values"], ours["caches after"]) == (CLEARED, GONE, False)
    table.rows["5"] = Row(
        f"the word reads {WORDS[stock[before]]} when the KV cache is freed",
        f"the word reads {WORDS[ours[before]]} when the KV cache is freed, then {WORDS[ours['word']]}",
        "real event_loop_normal and clear_cache, which notes the word",
    )


def test_nothing_in_a_shared_directory_is_executed(play: Play, table: Table) -> None:
    stock, ours = play("shared_directory_has_code")
    assert stock["executed"]
    assert not ours["executed"]
    assert (ours["word"], ours["loop"], ours["values"]) == (NORMAL, "runs", OLD)
    table.rows["6"] = Row(
        f"executed: {stock['executed']}; {told(stock)}",
        f"executed: {ours['executed']}; {told(ours)}",
        "`ipc_metas_0` is a pickle that makes a directory; /shared_ipc_meta is elsewhere, CUDA IPC is the host's",
    )


def test_files_of_an_older_step_are_refused(play: Play, table: Table) -> None:
    stock, ours = play("files_of_an_older_step")
    assert (stock["word"], stock["values"]) == (NORMAL, dict.fromkeys(OLD, 3.0))
    assert (ours["word"], ours["loop"], ours["values"]) == (NORMAL, "runs", NEW)
    assert "1.3" in ours["reason"]
    table.rows["7a"] = Row(
        told(stock), told(ours), f"{LOOP}; step 5 is live (its values are 2), then files and version.yaml say step 3"
    )


def test_a_flipped_byte_is_refused(play: Play, table: Table) -> None:
    stock, ours = play("a_byte_of_a_snapshot_flips")
    assert (stock["word"], stock["loop"]) == (NORMAL, "runs")
    assert stock["flipped"] == "served"
    assert (ours["word"], ours["loop"], ours["values"]) == (NORMAL, "runs", OLD)
    assert ours["flipped"] == "not served"
    table.rows["7b"] = Row(
        f"{stock['flipped']}; {told(stock)}",
        f"{ours['flipped']}; {told(ours)}",
        f"{LOOP}; a bit of the last tensor is turned. Stock: its own file, which has no checksum, so that nobody can "
        "tell; ours: a snapshot that SnapshotWriter wrote",
    )


def test_a_trainer_that_goes_on_writing_is_not_seen(play: Play, table: Table) -> None:
    stock, ours = play("trainer_goes_on_writing")
    assert stock["decoded with"] == 7.0
    assert ours["decoded with"] == 1.0
    assert ours["values"] == OLD
    table.rows["7c"] = Row(
        f"decodes with {stock['decoded with']}, which the trainer wrote after the update",
        f"decodes with {ours['decoded with']}, which was there at the update",
        "load strategy ipc; CUDA IPC is the host's for stock, a driver without a GPU for ours",
    )


def test_weights_wake_up_over_every_strategy(play: Play, table: Table) -> None:
    stock, ours = play("weights_sleep_and_wake_over_rsync")
    assert (stock["sleep"]["code"], stock["wakeup"]["code"], stock["values"]) == (200, 500, GONE)
    assert (ours["sleep"]["code"], ours["wakeup"]["code"], ours["values"]) == (200, 200, OLD)
    how = "/v1/sleep and /v1/wakeup as FastDeploy's run_control_method gets them; a stand-in for checkpoint_transfer"
    text = "wakeup answers {code}: {text}"
    table.rows["8a"] = Row(
        short(text.format(**stock["wakeup"])) + f"; parameters {values(stock['values'])}",
        short(text.format(**ours["wakeup"])) + f"; parameters {values(ours['values'])}",
        how,
    )


def test_a_second_tag_sleeps_too(play: Play, table: Table) -> None:
    stock, ours = play("a_second_tag_sleeps_after_the_first")
    assert (stock["both"], stock["caches"]) == (200, True)
    assert (ours["first"], ours["both"], ours["caches"], ours["values"]) == (200, 200, False, GONE)
    text = "the second sleep answers {}, and the KV cache is {}"
    table.rows["8b"] = Row(
        text.format(stock["both"], "there" if stock["caches"] else "freed"),
        text.format(ours["both"], "there" if ours["caches"] else "freed"),
        "sleep of `weight`, then of `weight,kv_cache`",
    )


def test_graphs_follow_a_cache_that_slept(play: Play, table: Table) -> None:
    stock, ours = play("kv_cache_alone_sleeps_and_wakes")
    assert stock["graphs"] == {"cleared": 0, "captured": 0}
    assert ours["graphs"]["cleared"] > 0
    assert ours["graphs"]["captured"] > 0
    text = "graphs dropped {cleared} times, captured {captured} times"
    table.rows["8c"] = Row(
        text.format(**stock["graphs"]),
        text.format(**ours["graphs"]),
        "sleep and wakeup of `kv_cache`; a capture is counted, not made: no GPU",
    )


def test_an_update_that_was_given_up_never_goes_live(play: Play, table: Table) -> None:
    stock, ours = play("front_end_gives_up")
    assert stock["gave up"]["code"] == ours["gave up"]["code"] == 404
    assert (stock["word"], stock["values"]) == (NORMAL, NEW)
    assert (ours["word"], ours["values"], ours["caches"]) == (CLEARED, GONE, False)
    text = "/update_model_weight answers {code} ({msg}) after a second; later: "
    table.rows["9a"] = Row(
        text.format(**stock["gave up"]) + told(stock),
        text.format(**ours["gave up"]) + told(ours),
        "real EngineClient.update_model_weight with a limit of 1 s on a cleared engine; loading takes 2 s, ours has "
        "a deadline of 1.5 s",
    )


def test_torn_weights_are_never_decoded_with(play: Play, table: Table, peers: dict[str, RealPeer]) -> None:
    stock, ours = play("second_tensor_cannot_be_taken")
    resumed = peers["stock"].call("real_faults.engine_gives_up_and_resumes")
    assert "timed out" in resumed["update"]
    assert not resumed["is_paused"]
    assert (stock["answer"]["code"], stock["decoded with"]) == (500, [2.0, 1.0])
    assert (ours["answer"]["code"], ours["decoded with"], ours["values"]) == (500, [1.0, 1.0], OLD)
    text = "update_weights answers {}; parameters {}; decodes with {}"
    table.rows["9b"] = Row(
        text.format(stock["answer"]["code"], values(stock["values"]), stock["decoded with"])
        + f"; FastDeploy's engine, after an update that {short(resumed['update'])}: resumed",
        text.format(ours["answer"]["code"], values(ours["values"]), ours["decoded with"]),
        "V1; the second tensor's memory cannot be had while parameters change",
    )


def test_memory_of_an_update_over_rsync(play: Play, table: Table, peers: dict[str, RealPeer], tmp_path: Path) -> None:
    """Told, not judged: ours keeps what it goes back to, which stock does not have."""
    stock, ours = play("state_dict_streams_in")
    tcp = peers["ours"].call("real_faults.state_dict_comes_over_tcp", path=str(tmp_path / "tcp"), port=free_port())
    assert stock["code"] == ours["code"] == tcp["code"] == 200
    assert set(stock["values"].values()) == set(ours["values"].values()) == set(tcp["values"].values()) == {3.0}
    text = "{:.2f} times the model"
    table.rows["10"] = Row(
        text.format(stock["beyond"] / stock["model"]),
        f"{text.format(ours['beyond'] / ours['model'])} over the same package, which has no manifest, so that it is "
        f"read once more; {text.format(tcp['beyond'] / tcp['model'])} over our own transport",
        f"peak of resident memory (VmHWM) beyond what is held before the second update, a model of "
        f"{stock['model'] >> 20} MiB; a stand-in for the stream of checkpoint_transfer (its older interface, which "
        "gives bytes, is not in this tree); ours holds the version before as well, to go back to",
    )


def test_main_and_mtp_parameters_of_one_name_are_both_updated(play: Play, table: Table) -> None:
    stock, ours = play("main_and_mtp_have_a_name_in_common")
    assert (stock["word"], stock["mtp"]) == (NORMAL, 2.0)
    assert stock["main"] == stock["main was"] != 2.0
    assert (ours["word"], ours["main"], ours["mtp"]) == (NORMAL, 2.0, 2.0)
    text = "after an update `a.weight` is {} in the main model and {} in MTP's"
    table.rows["11"] = Row(
        text.format("not even the first snapshot's" if stock["main"] not in (1.0, 2.0) else stock["main"], "new"),
        text.format("new", "new"),
        f"{LOOP}; both models have the same names",
    )


def test_a_uuid_names_a_device(play: Play, table: Table) -> None:
    stock, ours = play("gpu_is_named_by_its_uuid")
    assert "ValueError" in stock["loop"]
    assert ours == {"loop": "runs", "values": OLD}
    table.rows["12a"] = Row(
        f"start ended: {short(stock['loop'])}",
        f"starts; parameters {values(ours['values'])} (of its file)",
        "CUDA_VISIBLE_DEVICES=GPU-…",
    )


def test_a_signal_made_anew_is_followed(play: Play, table: Table) -> None:
    stock, ours = play("signal_is_made_anew")
    assert (stock["new word"], stock["values"]) == (UPDATING, OLD)
    table.rows["12b"] = Row(
        f"the new word still reads {WORDS[stock['new word']]}, parameters {values(stock['values'])}",
        f"the new word reads {WORDS[ours['new word']]}, parameters {values(ours['values'])}",
        "IPCSignal(create=True) on the live name, then a trainer writes 1 into the new one",
    )
