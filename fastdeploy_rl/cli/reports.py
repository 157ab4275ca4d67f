"""How an update's report reads on a terminal."""

from typing import TYPE_CHECKING

from fastdeploy_rl.cli.options import megabytes, print_fields, print_json

if TYPE_CHECKING:
    from fastdeploy_rl.report import UpdateReport


def print_report(report: "UpdateReport", *, as_json: bool) -> None:
    """The whole report as JSON, or its outline in a few lines."""
    if as_json:
        print_json(report)
        return
    is_change = report.stalls
    if is_change and report.outcome == "done" and not report.ranks and report.version == report.previous_version:
        already = f"version {report.version} is live already" if report.version else "no weights are loaded"
        print(f"{report.kind} done: nothing to do, {already}")
        print_fields(content_digest=report.receipt.content_digest if report.receipt else "")
        return
    print(f"{report.kind} {report.outcome}" + (f": {report.versions}" if report.versions else ""))
    stall = f", of which {report.stall_seconds * 1e3:.1f} ms without decoding" if is_change else ""
    print_fields(seconds=f"{report.seconds:.3f}{stall}", ranks=len(report.ranks) or "", **_moved(report))


def _moved(report: "UpdateReport") -> dict[str, object]:
    """What was done to memory; empty where nothing was."""
    reasons = report.not_aliased.items()
    return {
        "aliased": megabytes(report.aliased_bytes) if report.aliased_bytes else "",
        "copied": megabytes(report.copied_bytes) if report.copied_bytes else "",
        "applied": report.applied,
        "not_aliased": "; ".join(f"{len(names)} x {reason} ({_few(names)})" for reason, names in reasons),
        "rollback": report.rollback + (f": {report.rollback_reason}" if report.rollback_reason else ""),
        "kv_cache": report.kv,
        "graphs_captured": report.graphs_captured or "",
        "content_digest": report.receipt.content_digest if report.receipt else "",
        "reason": report.reason,
    }


def _few(names: list[str]) -> str:
    return ", ".join(names[:2]) + (", ..." if len(names) > 2 else "")
