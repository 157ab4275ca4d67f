"""Undoing an update on one rank, whatever step it fails at and however: what was live is there again to the byte, and
nothing is held. The cases come from the list of steps itself. Judged by raw bytes and by the lease table, never by the
product's sums."""

import contextlib
import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from time import monotonic_ns
from typing import Any, NamedTuple

import numpy as np
import pytest

from fastdeploy_rl.config import ROLLBACKS
from fastdeploy_rl.coverage import ParameterSpec
from fastdeploy_rl.engines.numpy.runner import NumpyModel, NumpyRunner, random_weights
from fastdeploy_rl.errors import ChecksumMismatchError, FastDeployRLError, NoSpaceError, SegmentError, StepFailedError
from fastdeploy_rl.memory.arena import ArenaPair
from fastdeploy_rl.memory.shared_segment import SharedSegment
from fastdeploy_rl.memory.tensor_view import TensorView
from fastdeploy_rl.plan.conventions import TensorRule
from fastdeploy_rl.plan.planner import LastPlan
from fastdeploy_rl.publish.leases import LeaseTable
from fastdeploy_rl.publish.publisher import Published, WeightPublisher
from fastdeploy_rl.sources.base import SourceConfig
from fastdeploy_rl.sources.ipc import IpcSource
from fastdeploy_rl.testing.faulty_source import Fail, FaultySource
from fastdeploy_rl.update import live_weights, planned_transfer, way_back
from fastdeploy_rl.update.cold_start import cold_weights
from fastdeploy_rl.update.live_weights import audit
from fastdeploy_rl.update.steps import STAGING_STEPS, STALLING_STEPS, RankUpdate, UpdateStep
from fastdeploy_rl.update.transaction import ClearCommand, RankCommand, RankState, UpdateCommand
from fastdeploy_rl.version import WeightVersion
from tests.process.numpy_engine import held_bytes

SPECS = (
    ParameterSpec("embed", "F32", (12, 5), 0, vocab_rows=11),
    ParameterSpec("norm", "F32", (5,), None),
    ParameterSpec("up", "F32", (5, 18), 1),
    ParameterSpec("down", "F32", (18, 5), 0),
    ParameterSpec("scale", "F32", (), None),
    ParameterSpec("empty", "F32", (0, 4), None),
)
AXES = {spec.name: spec.shard_axis for spec in SPECS}
MODEL = NumpyModel(SPECS)
RANK, NUM_RANKS, MAX_ARENAS = 1, 2, 3
STEPS = [step.name for step in (*STAGING_STEPS, *STALLING_STEPS)]
ERRORS: tuple[Callable[[], Exception], ...] = (
    lambda: RuntimeError("told to"),
    MemoryError,
    lambda: OSError(errno.ENOSPC, "no space left"),
)
MODES, OLDS = ("alias", "copy"), ("cold", "updated", "cleared")


def weights_of(step: int) -> dict[str, np.ndarray]:
    """As they are published: `norm` has to be cast, the padding of `embed` to be zeroed, `up` to be cut."""
    weights = random_weights(MODEL, step)
    return weights | {"norm": np.arange(step, step + 5, dtype=np.float16)}


def live_bytes_of(step: int) -> dict[str, bytes]:
    weights = weights_of(step) if step else random_weights(MODEL, 0)
    wide = weights | {"norm": weights["norm"].astype(np.float32)}
    return {spec.name: held_bytes(spec, wide, RANK, NUM_RANKS) for spec in SPECS}


class Silent:
    def begin(self, step: UpdateStep, update: RankUpdate) -> None: ...

    def end(self, step: UpdateStep, update: RankUpdate) -> None: ...


class Fault:
    """An observer that raises once, at the beginning or the end of one step."""

    def __init__(self, step: str, moment: str, error: Exception) -> None:
        self._where, self._error = (step, moment), error

    def begin(self, step: UpdateStep, update: RankUpdate) -> None:
        self._meet(step.name, "begin")

    def end(self, step: UpdateStep, update: RankUpdate) -> None:
        self._meet(step.name, "end")

    def _meet(self, *here: str) -> None:
        if here == self._where:
            raise self._error


class Breakable(NumpyRunner):
    """Call number `breaks_at` from now on does half of its work and raises."""

    breaks_at = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.graphs: dict[str, int] = {}

    def _is_broken(self) -> bool:
        self.breaks_at -= 1
        return self.breaks_at == 0

    def bind(self, views: Any) -> None:
        if self._is_broken():
            self._bound = dict(list(views.items())[: len(views) // 2])
            raise MemoryError
        super().bind(views)

    def drain(self, deadline_ns: int) -> None:
        super().drain(deadline_ns)
        self._break()

    def rebuild_kv_cache(self, content_digest: str) -> None:
        if self._is_broken():
            self._kv_digest = None
            raise MemoryError
        super().rebuild_kv_cache(content_digest)

    def recapture_graphs(self) -> None:
        super().recapture_graphs()
        self.graphs = places(self)
        self._break()

    def set_version(self, version: str) -> None:
        super().set_version(version)
        self._break()

    def _break(self) -> None:
        if self._is_broken():
            raise MemoryError

    @property
    def kv_digest(self) -> str | None:
        return self._kv_digest


def places(runner: NumpyRunner) -> dict[str, int]:
    return {name: view.mapping.address + view.offset for name, view in runner.bound().items()}


class Standing(NamedTuple):
    """All that must be as it was."""

    live_bytes: dict[str, bytes]
    places: dict[str, int]
    version: str
    kv_digest: str | None
    graphs: dict[str, int]
    num_leases: int
    num_free_arenas: int


class Rig:
    """One rank, its channel and its trainer, in this process. Lives in a `with` of `rig`."""

    def __init__(self, publisher: WeightPublisher, source: FaultySource, table: LeaseTable, mode: str, rollback: str):
        self.publisher, self.source, self.table = publisher, source, table
        self.mode, self.rollback = mode, rollback
        self.runner = Breakable(MODEL, RANK, NUM_RANKS)
        self.arenas = ArenaPair()
        self.state = RankState(self.runner, source, LastPlan(SPECS, RANK, NUM_RANKS), self.arenas, 1)
        self._steps = count(1)

    def publish(self) -> Published:
        step = next(self._steps)
        return self.publisher.publish(
            weights_of(step), step=step, convention=lambda name, shape: TensorRule(name, AXES.get(name))
        )

    def command(self, published: Published, observer: Any = None) -> UpdateCommand:
        update = RankUpdate(
            version=published.version,
            content_digest=published.manifest.content_digest,
            deadline_ns=monotonic_ns() + 20_000_000_000,
            runner=self.runner,
            source=self.source,
            plans=self.state.plans,
            arenas=self.arenas,
            apply_mode=self.mode,
            rollback=self.rollback,
            num_threads=1,
            old=self.state.live,
        )
        return UpdateCommand(self.state, update, observer or Silent())

    def update(self) -> UpdateCommand:
        """A good one, judged by its bytes."""
        published = self.publish()
        command = self.command(published)
        run(command)
        command.retire()
        assert self.live_bytes() == live_bytes_of(published.version.step)
        assert self.runner.token()
        return command

    def go_to(self, old: str) -> None:
        """The state before the update that is to fail."""
        clear = ClearCommand(self.state, monotonic_ns() + 20_000_000_000)
        clear.stall()
        clear.commit()
        if old == "updated":
            self.update()
        elif old == "cold":
            self.state.live = cold_weights(WeightVersion(0, 0), self.runner.load(0), self.runner, 1)
            self.runner.rebuild_kv_cache(self.state.live.content_digest)
            self.runner.set_version("0.0")
            self.runner.recapture_graphs()

    def standing(self) -> Standing:
        return Standing(
            self.live_bytes(),
            places(self.runner),
            self.runner.version if self.state.live else "",
            self.runner.kv_digest,
            self.runner.graphs if self.state.live else {},
            sum(len(self.table.holders(arena)) for arena in range(MAX_ARENAS)),
            self._num_free_arenas(),
        )

    def live_bytes(self) -> dict[str, bytes]:
        return {name: view.numpy().tobytes() for name, view in self.runner.bound().items()}

    def _num_free_arenas(self) -> int:
        taken = []
        try:
            while True:
                taken.append(self.arenas.acquire(1))
        except SegmentError:
            return len(taken)
        finally:
            for arena in taken:
                self.arenas.release(arena)

    def fence(self, command: RankCommand) -> None:
        """What the manager does with a rank that cannot go back."""
        live, self.state.live = self.state.live, None
        self.runner.drop_kv_cache()
        self.runner.unbind()
        command.abandon()
        if live is not None:
            live.release(self.arenas)

    def in_force(self, old: str) -> str:
        is_copy_onto_live = self.mode == "copy" and old != "cleared"
        can_have = self.rollback == "off" or old == "updated"
        return self.rollback if is_copy_onto_live and can_have else "keep"


@contextmanager
def rig(place: Path, mode: str, rollback: str = "keep") -> Iterator[Rig]:
    with WeightPublisher(place / "channel", max_arenas=MAX_ARENAS, deadline_s=2.0) as publisher:
        table = LeaseTable(publisher.channel.leases_of(0), publisher.channel.holders_dir)
        table.open()
        source = FaultySource(IpcSource(SourceConfig(place / "channel")))
        made = Rig(publisher, source, table, mode, rollback)
        try:
            yield made
        finally:
            made.go_to("cleared")
            source.close()
            table.close()


def run(command: UpdateCommand) -> None:
    command.stage()
    command.stall()
    command.commit()


def check_undone(rig: Rig, command: UpdateCommand, before: Standing, case: object) -> None:
    """Undone, or fenced where the policy in force has no way back from what was written."""
    if command.report().rollback == "off" and rig.live_bytes() != before.live_bytes:
        with pytest.raises(StepFailedError, match=r"could not be brought back \(off\)"):
            command.undo()
        rig.fence(command)
        assert (case, rig.standing()) == (case, Standing({}, {}, "", None, {}, 0, 2))
        return
    command.undo()
    is_kv_lost = command.report().kv == "lost"
    assert (case, rig.standing()) == (case, before)
    command.undo()
    assert (case, rig.standing(), command.report().kv == "lost") == (case, before, is_kv_lost)


@pytest.mark.parametrize("rollback", ROLLBACKS)
@pytest.mark.parametrize("old", OLDS)
@pytest.mark.parametrize("mode", MODES)
def test_a_fault_at_either_end_of_any_step_is_undone(tmp_path: Path, mode: str, old: str, rollback: str) -> None:
    with rig(tmp_path, mode, rollback) as rank:
        for step, moment in [(step, moment) for step in STEPS for moment in ("begin", "end")]:
            rank.go_to(old)
            published = rank.publish()
            for error in ERRORS:
                case, before = (step, moment, error), rank.standing()
                command = rank.command(published, Fault(step, moment, error()))
                with pytest.raises(StepFailedError, match=f"rank 1, {step}: "):
                    run(command)
                is_staged = step not in ("resolve", "stage", "vote")
                assert (case, command.report().rollback) == (case, rank.in_force(old) if is_staged else "")
                check_undone(rank, command, before, case)
                if rank.state.live is None:  # as before, or fenced
                    rank.go_to(old)
                    published = rank.publish()
            rank.update()


@pytest.mark.parametrize("old", OLDS)
@pytest.mark.parametrize("mode", MODES)
def test_a_call_of_the_runner_that_breaks_half_way_is_undone(tmp_path: Path, mode: str, old: str) -> None:
    with rig(tmp_path, mode) as rank:
        num_broken = 0
        for number in range(1, 10):
            rank.go_to(old)
            before = rank.standing()
            command = rank.command(rank.publish())
            rank.runner.breaks_at = number
            try:
                run(command)
            except StepFailedError:
                num_broken += 1
                check_undone(rank, command, before, number)
                rank.update()
            else:
                rank.runner.breaks_at = 0
                command.retire()
        assert num_broken == (4 if mode == "copy" and old != "cleared" else 5)


def test_graphs_that_a_broken_bind_put_out_of_use_are_in_use_again(tmp_path: Path) -> None:
    with rig(tmp_path, "alias") as rank:
        rank.go_to("updated")
        runner = rank.runner
        command = rank.command(rank.publish())

        def break_off(views: dict[str, TensorView]) -> None:
            del runner.bind
            runner.drop_graphs()
            raise MemoryError

        runner.bind = break_off  # type: ignore[method-assign]
        with pytest.raises(StepFailedError):
            run(command)
        assert not runner.has_graphs
        command.undo()
        assert runner.has_graphs


class Half:
    """`transfer` of the native core, which at call `breaks_at` does half of its jobs and runs out of memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.breaks_at = 0
        self._transfer = live_weights.transfer
        for module in (live_weights, planned_transfer, way_back):
            monkeypatch.setattr(module, "transfer", self)

    def __call__(self, regions: Any, num_threads: int) -> Any:
        self.breaks_at -= 1
        if self.breaks_at == 0:
            self._transfer(regions[: len(regions) // 2], num_threads)
            del regions  # the native core has no frame that an error could keep alive
            raise MemoryError
        return self._transfer(regions, num_threads)


@pytest.mark.parametrize("rollback", ROLLBACKS)
@pytest.mark.parametrize("old", OLDS)
@pytest.mark.parametrize("mode", MODES)
def test_a_pass_over_memory_that_breaks_half_way_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, old: str, rollback: str
) -> None:
    half = Half(monkeypatch)
    with rig(tmp_path, mode, rollback) as rank:
        for number in count(1):
            rank.go_to(old)
            before = rank.standing()
            command = rank.command(rank.publish())
            half.breaks_at = number
            try:
                run(command)
            except StepFailedError:
                check_undone(rank, command, before, number)
                rank.update()
            else:
                half.breaks_at = 0
                command.retire()
                break
        in_place = 4 if rank.in_force(old) == "keep" and old != "cleared" else 2
        assert number > (in_place if rank.mode == "copy" else 1)


@pytest.mark.parametrize("rollback", ["keep", "refetch"])
def test_an_undo_that_breaks_is_called_again_and_comes_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rollback: str
) -> None:
    """Copying: the first writing back, and the first reading of it, do half of their work."""
    half = Half(monkeypatch)
    with rig(tmp_path, "copy", rollback) as rank:
        for number in (1, 2):
            rank.go_to("updated")
            before = rank.standing()
            command = rank.command(rank.publish(), Fault("commit", "end", RuntimeError("told to")))
            with pytest.raises(StepFailedError):
                run(command)
            half.breaks_at = number
            with pytest.raises(StepFailedError, match="undo of install: MemoryError"):
                command.undo()
            assert rank.live_bytes() != before.live_bytes or number == 2
            check_undone(rank, command, before, number)
            rank.update()


@pytest.mark.parametrize("old", OLDS)
@pytest.mark.parametrize("mode", MODES)
def test_a_runner_that_breaks_while_it_is_brought_back_is_brought_back_by_a_second_call(
    tmp_path: Path, mode: str, old: str
) -> None:
    with rig(tmp_path, mode) as rank:
        for number in range(1, 5):
            rank.go_to(old)
            before = rank.standing()
            command = rank.command(rank.publish(), Fault("commit", "end", RuntimeError("told to")))
            with pytest.raises(StepFailedError):
                run(command)
            rank.runner.breaks_at = number
            with contextlib.suppress(StepFailedError):
                command.undo()
            rank.runner.breaks_at = 0
            check_undone(rank, command, before, number)
        rank.update()


@pytest.mark.parametrize("error", [MemoryError(), NoSpaceError("full")])
@pytest.mark.parametrize("old", OLDS)
@pytest.mark.parametrize("mode", MODES)
def test_no_memory_for_an_arena_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, old: str, error: Exception
) -> None:
    def refuse(self: ArenaPair, num_bytes: int) -> None:
        raise error

    with rig(tmp_path, mode) as rank:
        rank.go_to(old)
        before = rank.standing()
        command = rank.command(rank.publish())
        with monkeypatch.context() as patched:
            patched.setattr(ArenaPair, "acquire", refuse)
            with pytest.raises(FastDeployRLError, match=r"full|MemoryError"):
                command.stage()
        check_undone(rank, command, before, "acquire")
        for _ in range(4):
            rank.update()


@pytest.mark.parametrize(("mode", "method"), [("alias", "release"), ("copy", "release"), ("copy", "trim")])
def test_memory_that_cannot_be_let_go_at_first_is_let_go_by_a_second_undo(
    tmp_path: Path, mode: str, method: str
) -> None:
    with rig(tmp_path, mode) as rank:
        rank.go_to("updated")
        before = rank.standing()
        command = rank.command(rank.publish(), Fault("verify", "end", RuntimeError("told to")))
        with pytest.raises(StepFailedError):
            run(command)
        rank.source.then(method, Fail(SegmentError("still in use")))
        with pytest.raises(SegmentError, match="still in use"):
            command.undo()
        assert rank.live_bytes() == before.live_bytes
        check_undone(rank, command, before, method)
        rank.update()


def test_what_install_needs_to_be_undone_is_not_let_go_while_that_fails(tmp_path: Path) -> None:
    with rig(tmp_path, "alias") as rank:
        rank.go_to("updated")
        before = rank.standing()
        command = rank.command(rank.publish(), Fault("install", "end", RuntimeError("told to")))
        with pytest.raises(StepFailedError):
            run(command)
        rank.runner.breaks_at = 1
        with pytest.raises(StepFailedError, match="undo of install: MemoryError"):
            command.undo()
        assert rank.standing().num_leases == before.num_leases + 1
        check_undone(rank, command, before, "again")


def test_a_commit_that_raises_has_changed_nothing_and_may_be_called_again(tmp_path: Path) -> None:
    with rig(tmp_path, "copy") as rank:
        rank.go_to("updated")
        live, published = rank.state.live, rank.publish()
        command = rank.command(published)
        command.stage()
        command.stall()
        rank.runner.breaks_at = 1
        with pytest.raises(StepFailedError, match="rank 1, commit"):
            command.commit()
        assert rank.state.live is live
        command.commit()
        command.retire()
        assert rank.live_bytes() == live_bytes_of(published.version.step)
        assert [step.step for step in command.report().steps].count("commit") == 1
        rank.update()


def test_a_clear_that_cannot_let_memory_go_is_fenced_and_lets_it_go_then(tmp_path: Path) -> None:
    with rig(tmp_path, "alias") as rank:
        rank.go_to("updated")
        rank.source.then("release", Fail(SegmentError("still in use")))
        clear = ClearCommand(rank.state, monotonic_ns() + 20_000_000_000)
        clear.stall()
        with pytest.raises(SegmentError, match="still in use"):
            clear.commit()
        rank.fence(clear)
        assert rank.standing() == Standing({}, {}, "", None, {}, 0, 2)
        rank.update()


def flip(view: TensorView) -> None:
    """One bit of the memory itself."""
    with memoryview(view.mapping) as memory:
        memory[view.offset + 1] ^= 4


def flip_published(published: Published, name: str) -> None:
    tensor = next(tensor for tensor in published.manifest.tensors if tensor.name == name)
    part = tensor.parts[-1]
    locator = published.manifest.segments[part.segment].locator
    with SharedSegment.attach(locator, writable=True) as segment, memoryview(segment.mapping) as memory:
        memory[part.offset + tensor.num_bytes - 2] ^= 4


@pytest.mark.parametrize("rollback", ["keep", "refetch"])
def test_a_way_back_that_was_corrupted_meanwhile_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rollback: str
) -> None:
    with rig(tmp_path, "copy", rollback) as rank:
        rank.go_to("cleared")
        former = rank.publish()
        first = rank.command(former)
        run(first)
        first.retire()
        command = rank.command(rank.publish(), Fault("verify", "end", RuntimeError("told to")))
        command.stage()
        assert command.report().rollback == rollback
        if rollback == "keep":
            flip(command._update.way_back.views["down"])
        else:
            flip_published(former, "norm")
        with pytest.raises(StepFailedError, match="told to"):
            command.stall()
        for _ in range(2):
            with pytest.raises(
                StepFailedError, match=rf"could not be brought back \({rollback}\): .*, first (down|norm)"
            ):
                command.undo()
        rank.fence(command)
        assert rank.standing() == Standing({}, {}, "", None, {}, 0, 2)
        rank.update()


def test_refetch_says_before_anything_is_touched_why_it_keeps_the_old_bytes_instead(tmp_path: Path) -> None:
    """Cold weights are in no channel; a version whose bytes changed there is none either."""
    with rig(tmp_path, "copy", "refetch") as rank:
        rank.go_to("cold")
        command = rank.command(rank.publish())
        command.stage()
        report = command.report()
        assert (report.rollback, report.rollback_bytes > 0) == ("keep", True)
        assert "version 0.0 cannot be fetched again: " in report.rollback_reason
        assert rank.live_bytes() == live_bytes_of(0)
        command.undo()
        rank.go_to("cleared")
        former = rank.publish()
        first = rank.command(former)
        run(first)
        first.retire()
        flip_published(former, "norm")
        command = rank.command(rank.publish())
        command.stage()
        assert (command.report().rollback, "does not hold" in command.report().rollback_reason) == ("keep", True)
        command.undo()
        rank.update()


def test_what_each_policy_costs(tmp_path: Path) -> None:
    """keep: memory of the weights' size, held between updates too. refetch and off: none of it stays."""
    sizes = {}
    for rollback in ROLLBACKS:
        with rig(tmp_path / rollback, "copy", rollback) as rank:
            rank.go_to("cold")
            rank.update()
            command = rank.command(rank.publish())
            command.stage()
            report = command.report()
            sizes[rollback] = (report.rollback, report.rollback_bytes, rank.arenas.num_bytes)
            command.undo()
    num_bytes = sizes["keep"][1]
    assert num_bytes >= sum(map(len, live_bytes_of(1).values()))
    assert sizes == {"keep": ("keep", num_bytes, num_bytes), "refetch": ("refetch", 0, 0), "off": ("off", 0, 0)}


@pytest.mark.parametrize("rollback", ROLLBACKS)
def test_a_rebind_goes_back_at_no_cost_whatever_was_asked_for(tmp_path: Path, rollback: str) -> None:
    with rig(tmp_path, "alias", rollback) as rank:
        rank.go_to("updated")
        report = rank.update().report()
        reason = "" if rollback == "keep" else "a rebind leaves the old weights in place"
        assert (report.rollback, report.rollback_bytes, report.rollback_reason) == ("keep", 0, reason)


@pytest.mark.parametrize("mode", MODES)
def test_a_cleared_rank_has_no_memory_after_an_update_that_failed(tmp_path: Path, mode: str) -> None:
    with rig(tmp_path, mode) as rank:
        rank.go_to("cleared")
        command = rank.command(rank.publish(), Fault("commit", "begin", MemoryError()))
        with pytest.raises(StepFailedError):
            run(command)
        command.undo()
        assert (rank.arenas.num_bytes, rank.runner.bound(), rank.runner.kv_digest) == (0, {}, None)


def test_an_undo_that_emptied_the_kv_cache_says_so(tmp_path: Path) -> None:
    with rig(tmp_path, "alias") as rank:
        # Of several ranks another one may have come further: then what this one had is of no use.
        for step, kv in (("stage", ""), ("drain", "lost"), ("verify", "lost"), ("recapture_graphs", "lost")):
            rank.go_to("updated")
            command = rank.command(rank.publish(), Fault(step, "end", RuntimeError("told to")))
            with pytest.raises(StepFailedError):
                run(command)
            command.undo()
            assert (step, command.report().kv) == (step, kv)


@pytest.mark.parametrize("name", ["down", "norm"])
def test_an_audit_names_the_parameter_whose_live_memory_changed(tmp_path: Path, name: str) -> None:
    """`down` lies in published memory, `norm` is a copy in the engine's own."""
    with rig(tmp_path, "alias") as rank:
        published = rank.publish()
        command = rank.command(published)
        run(command)
        command.retire()
        assert command.report().not_aliased.keys() & {"down", "norm"} == {"norm"}
        live = rank.state.live
        assert live is not None
        audit(live, RANK, 1)
        if name == "norm":
            flip(live.views[name])
        else:
            flip_published(published, name)
        with pytest.raises(ChecksumMismatchError, match=rf"rank 1, version {published.version}: 1 .* first {name}"):
            audit(live, RANK, 1)
