"""What a report and a receipt show when they are printed."""

from msgspec import structs

from fastdeploy_rl.receipt import Receipt
from fastdeploy_rl.report import RankReport, UpdateReport, history_entry

RECEIPT = Receipt("3.7", "ipc", "ab12", {"w": "00"}, {"w": ["00"]})
RANK = RankReport(0, [], 0.01, "auto", 64, 32, {"model.w": "transposed"})


def report(outcome: str, reason: str = "") -> UpdateReport:
    return UpdateReport(1, "update", outcome, "3.7", "", 0.5, 0.01, [RANK, RANK], reason=reason, receipt=RECEIPT)


def test_a_printed_report_is_one_line_that_names_no_tensor() -> None:
    assert str(report("done")) == (
        "update done, version 3.7 (was none), 0.500 s, 10.0 ms of it without decoding, 128 bytes aliased, 64 copied"
    )


def test_a_printed_report_says_what_way_back_it_had_where_that_is_more_than_the_old_memory() -> None:
    def shown(*ranks: RankReport) -> str:
        return str(structs.replace(report("done"), ranks=list(ranks)))

    kept = structs.replace(RANK, rollback="keep", rollback_bytes=96)
    assert shown(kept, kept).endswith(" copied, rollback keep (192 bytes)")
    assert shown(structs.replace(RANK, rollback="off"), kept).endswith(" copied, rollback off and keep (96 bytes)")
    assert shown(structs.replace(RANK, rollback="keep", rollback_reason="a rebind")).endswith(" copied")
    assert history_entry(report("done"), 1, 0.0).rollback == ""
    assert history_entry(structs.replace(report("done"), ranks=[kept]), 1, 0.0).rollback == "keep (96 bytes)"


def test_a_printed_rejection_says_the_first_line_of_why() -> None:
    assert str(report("rejected", "it does not fit:\nmodel.w: missing")).endswith(" copied: it does not fit:")


def test_a_printed_receipt_is_one_line_that_names_no_tensor() -> None:
    assert str(RECEIPT) == "version 3.7 from ipc: 1 tensors, content ab12"


def test_a_printed_pause_tells_of_no_update() -> None:
    paused = UpdateReport(1, "pause", "done", "3.7", "3.7", 0.012, 0.0, [RankReport(0, [])])
    assert str(paused) == "pause done, version 3.7, 0.012 s"
    assert str(structs.replace(paused, version="", previous_version="")) == "pause done, 0.012 s"
    refused = structs.replace(paused, outcome="rejected", reason="2 requests had not ended\nand more")
    assert str(refused) == "pause rejected, version 3.7, 0.012 s: 2 requests had not ended"


def test_a_printed_sleep_names_what_was_live_and_a_wake_what_came_back() -> None:
    asleep = UpdateReport(1, "sleep", "done", "", "3.7", 0.5, 0.1, [RankReport(0, [])])
    assert str(asleep) == "sleep done, version 3.7, 0.500 s"
    woken = structs.replace(
        asleep, kind="wake", version="3.8", ranks=[structs.replace(RANK, graphs_captured=2, kv="rebuilt")]
    )
    assert str(woken) == (
        "wake done, version 3.8 (was 3.7), 0.500 s, 64 bytes aliased, 32 copied, KV cache rebuilt, 2 graphs captured"
    )


def test_the_rank_that_kept_least_speaks_for_the_cache() -> None:
    def kv(*words: str) -> str:
        return structs.replace(report("done"), ranks=[structs.replace(RANK, kv=word) for word in words]).kv

    assert (kv("", ""), kv("kept", "kept"), kv("kept", "rebuilt"), kv("kept", "lost")) == (
        "",
        "kept",
        "rebuilt",
        "lost",
    )
