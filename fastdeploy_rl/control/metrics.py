"""What Prometheus is told about an engine: the reports, the status and the requests, as numbers.

Owns names and labels; each label value is a word of the design. Refuses to know where the numbers come from. Uses a
registry of its own, so that two engines in one process do not collide.
"""

import math
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from fastdeploy_rl.control.generation import EngineLoad
from fastdeploy_rl.lifecycle import Admission, Residency
from fastdeploy_rl.report import EngineStatus, UpdateReport

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_STEP_BUCKETS = (0.0001, 0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0)


class EngineMetrics:
    """`observe_*` as things happen; `render` gives the page."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        prefix = "fastdeploy_rl"
        self._weights = Gauge(
            f"{prefix}_weights_live", "1 for the live version", ["version", "content_digest"], registry=self._registry
        )
        self._admission = Gauge(f"{prefix}_admission", "1 for the present state", ["state"], registry=self._registry)
        self._updates = Counter(
            f"{prefix}_updates", "Commands by kind and outcome", ["kind", "outcome"], registry=self._registry
        )
        self._step_seconds = Histogram(
            f"{prefix}_step_seconds",
            "Seconds of one step on one rank",
            ["step"],
            buckets=_STEP_BUCKETS,
            registry=self._registry,
        )
        self._stall_seconds = Histogram(
            f"{prefix}_stall_seconds",
            "Seconds without decoding, by command",
            ["kind"],
            buckets=_STEP_BUCKETS,
            registry=self._registry,
        )
        self._recaptured = Counter(
            f"{prefix}_graphs_recaptured", "Graphs captured anew, by command", ["kind"], registry=self._registry
        )
        self._residency = Gauge(
            f"{prefix}_residency", "1 for where the memory of a tag is", ["tag", "state"], registry=self._registry
        )
        self._paused = Gauge(f"{prefix}_paused", "1 while somebody paused the engine", registry=self._registry)
        self._prefix_pages = Counter(
            f"{prefix}_prefix_cache_pages",
            "Pages of prompts that the prefix cache had, had not, or had only under other weights",
            ["result"],
            registry=self._registry,
        )
        self._graphs = Counter(f"{prefix}_graphs", "Graphs by what was done", ["event"], registry=self._registry)
        self._counted = EngineLoad()
        self._bytes = Counter(f"{prefix}_weight_bytes", "Weight bytes taken over", ["apply"], registry=self._registry)
        self._requests = Counter(
            f"{prefix}_requests", "Requests by how they ended", ["result"], registry=self._registry
        )
        self._requests_now = Gauge(
            f"{prefix}_requests_now", "Requests in the engine by state", ["state"], registry=self._registry
        )
        self._kv_pages = Gauge(
            f"{prefix}_kv_pages", "Pages of the KV cache by state", ["state"], registry=self._registry
        )
        self._tokens = Counter(f"{prefix}_tokens", "Tokens by kind", ["kind"], registry=self._registry)
        self._heartbeat_age = Gauge(
            f"{prefix}_heartbeat_age_seconds", "Age of a rank's last sign of life", ["rank"], registry=self._registry
        )

    def observe_report(self, report: UpdateReport) -> None:
        self._updates.labels(report.kind, report.outcome).inc()
        self._stall_seconds.labels(report.kind).observe(report.stall_seconds)
        for step, seconds in _steps(report):
            self._step_seconds.labels(step).observe(seconds)
        self._bytes.labels("aliased").inc(report.aliased_bytes)
        self._bytes.labels("copied").inc(report.copied_bytes)
        self._recaptured.labels(report.kind).inc(report.graphs_captured)

    def observe_request(self, result: str, *, prompt_tokens: int, completion_tokens: int) -> None:
        """`result`: "stop", "length", "abort", "cancel" or "refused"."""
        self._requests.labels(result).inc()
        self._tokens.labels("prompt").inc(prompt_tokens)
        self._tokens.labels("completion").inc(completion_tokens)

    def render(self, status: EngineStatus, load: EngineLoad) -> bytes:
        """The page in Prometheus' text format, with `status` and `load` as the present."""
        self._weights.clear()
        if status.version and status.is_serving:
            self._weights.labels(status.version, status.content_digest).set(1)
        for state in Admission:
            self._admission.labels(state.value).set(state.value == status.admission)
        for tag, residency in status.residency.items():
            for place in Residency:
                self._residency.labels(tag, place.value).set(place.value == residency)
        self._paused.set(status.is_paused)
        for rank in status.ranks:
            age_s = math.inf if rank.heartbeat_age_s is None else rank.heartbeat_age_s
            self._heartbeat_age.labels(str(rank.rank)).set(age_s)
        self._requests_now.labels("running").set(load.num_running)
        self._requests_now.labels("waiting").set(load.num_waiting)
        self._kv_pages.labels("free").set(load.num_free_pages)
        self._kv_pages.labels("held").set(load.num_pages - load.num_free_pages)
        self._count(load)
        return generate_latest(self._registry)

    def _count(self, load: EngineLoad) -> None:
        """Adds what came since the last time. After rank 0 was started again its counts are smaller, from 0 on."""
        before, self._counted = self._counted, load
        for counter, field in (
            (self._prefix_pages.labels("hit"), "num_prefix_hits"),
            (self._prefix_pages.labels("miss"), "num_prefix_misses"),
            (self._prefix_pages.labels("refused"), "num_prefix_refusals"),
            (self._graphs.labels("captured"), "num_graphs_captured"),
            (self._graphs.labels("replayed"), "num_graph_replays"),
        ):
            old, new = getattr(before, field), getattr(load, field)
            counter.inc(new - old if new >= old else new)


def _steps(report: UpdateReport) -> Iterator[tuple[str, float]]:
    return ((step.step, step.seconds) for rank in report.ranks for step in rank.steps)
