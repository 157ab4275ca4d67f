"""The steps of an update, as data: what each does, and how it is undone.

`resolve -> stage -> vote -> drain -> install -> verify -> rebuild_kv_cache -> recapture_graphs -> commit`. Metrics,
traces, progress and fault tests walk the same list. `vote` is where the ranks decide together, so it has nothing of its
own to do here. A step returns the bytes it moved or read. Each undo restores, bitwise, what stood before its step; it
may find the step half done or not begun, and may be called again. Knows one rank; refuses to know the others."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.checksum import ZERO
from fastdeploy_rl.config import ALIAS, ALIAS_STRICT, AUTO, COPY, KEEP, OFF, REBUILD, REFETCH
from fastdeploy_rl.errors import (
    ConfigurationError,
    NoPublicationError,
    NotAliasableError,
    StepFailedError,
    TrainerError,
    WorldError,
)
from fastdeploy_rl.lifecycle import Tag, UpdateEvent
from fastdeploy_rl.memory.arena import ArenaPair
from fastdeploy_rl.memory.tensor_view import TensorView
from fastdeploy_rl.plan.plan import Plan
from fastdeploy_rl.plan.planner import LastPlan
from fastdeploy_rl.runner import ModelRunner
from fastdeploy_rl.sources.base import (
    NOT_ASKED,
    NOT_IMMUTABLE,
    ResolvedPublication,
    StagedSource,
    WeightSource,
    readable,
)
from fastdeploy_rl.update.apply_choice import NOT_CHOSEN, ApplyChoice, CopySpeed, choose
from fastdeploy_rl.update.apply_facts import TimedArrivals, Weighed
from fastdeploy_rl.update.live_weights import LiveWeights, check_sums, live_checksums
from fastdeploy_rl.update.pace import Pace
from fastdeploy_rl.update.placement import arena_bytes, copied_parameters, placed
from fastdeploy_rl.update.planned_transfer import Sums, copy_arriving, transfer_arriving, transfer_planned
from fastdeploy_rl.update.way_back import FormerVersion, KeptBytes, NoWayBack, WayBack, restore
from fastdeploy_rl.version import WeightVersion

_MAX_NAMED = 5


@dataclass
class RankUpdate:
    """One rank's working state of one update: what the steps read and fill in, from left to right."""

    version: WeightVersion
    content_digest: str
    deadline_ns: int
    runner: ModelRunner
    source: WeightSource
    plans: LastPlan
    arenas: ArenaPair
    apply_mode: str
    num_threads: int
    old: LiveWeights | None
    asleep_digest: str = ""
    """Of the weights that sleep in host memory; they may have filled the KV cache that is there."""
    num_staging_threads: int = 1
    """While the engine serves, which needs cores itself."""
    rollback: str = KEEP
    kv_policy: str = REBUILD
    in_flight: str = KEEP
    brings: frozenset[Tag] = frozenset(Tag)
    """What the engine is to have in place afterwards, besides the weights; the rest sleeps on."""
    has_checksums: bool = True
    """False: nothing is read that need not be copied, and nothing is proved."""
    resolved: ResolvedPublication | None = None
    plan: Plan | None = None
    """From `stage` on with the places where the source has the bytes."""
    staged: StagedSource | None = None
    arena: Mapping | None = None
    """alias: engine memory for what cannot be aliased. copy onto nothing: the new home. Else None."""
    way_back: WayBack | None = None
    """copy onto live weights: what is held to undo it."""
    choice: ApplyChoice | None = None
    """auto: what `stage` made of it."""
    copy_speed: CopySpeed = field(default_factory=CopySpeed)
    """The rank's; `stage` measures it."""
    not_aliased: dict[str, str] = field(default_factory=dict)
    """alias, auto: parameters that were copied all the same, and why."""
    new: LiveWeights | None = None
    prepared: object = None
    """What the runner made of `new` in advance; it looks at the same memory."""
    is_installed: bool = False
    """The parameters may lie in new memory, or hold new bytes."""
    has_left_decoding: bool = False
    """The stalled part began: other ranks may have done any of it."""
    had_kv_cache: bool = False
    had_graphs: bool = False
    is_kv_touched: bool = False
    """The cache may be the new weights', rebuilt or kept."""
    is_recaptured: bool = False
    graphs_captured: int = 0
    is_kv_lost: bool = False
    """An undo emptied the old weights' KV cache."""

    @property
    def way(self) -> str:
        """The apply mode in force: that of `choice` where `auto` has one, else the one that was asked for."""
        return self.apply_mode if self.choice is None else self.choice.applied

    @property
    def copies_in_place(self) -> bool:
        return self.way == COPY and self.old is not None and not self.runner.fills_parameters


@dataclass(frozen=True)
class UpdateStep:
    """A named step; `event` is what the update table of lifecycle.py calls its beginning."""

    name: str
    event: UpdateEvent
    do: Callable[[RankUpdate], int]
    undo: Callable[[RankUpdate], None]


# --- resolve: find the version's manifest and plan for it; holds nothing ---------------------------


def resolve(update: RankUpdate) -> int:
    resolved = update.source.resolve(update.version, deadline_ns=update.deadline_ns)
    if resolved.manifest.content_digest != update.content_digest:
        raise NoPublicationError(
            f"version {update.version}: another publication replaced the one that rank 0 found; update again"
        )
    update.resolved = resolved
    update.plan = update.plans.make(resolved.manifest)
    return 0


def forget(update: RankUpdate) -> None:
    update.resolved = update.plan = None


# --- stage: lease, read and check every byte, and copy what needs a copy, while the engine serves ---


def stage(update: RankUpdate) -> int:
    update.staged = update.source.stage(_known(update.resolved), _known(update.plan), deadline_ns=update.deadline_ns)
    update.plan = plan = update.staged.plan
    if update.apply_mode == ALIAS_STRICT:
        _refuse_copies(plan, update.version)
    if update.apply_mode in (ALIAS, ALIAS_STRICT) and not update.staged.is_immutable:
        raise ConfigurationError(
            f"apply mode {update.apply_mode} needs a source whose memory stays as it is; use --apply-mode copy"
        )
    if update.apply_mode == AUTO:
        update.choice = _chosen(update, plan)
    if update.copies_in_place:
        _prepare_way_back(update)
    update.new = _stage_new_weights(update)
    if not update.copies_in_place:
        update.prepared = update.runner.prepare(update.new.views)
    return plan.read_bytes


def _chosen(update: RankUpdate, plan: Plan) -> ApplyChoice:
    weighed = Weighed(
        plan=plan,
        staged=_known(update.staged),
        manifest=_known(update.resolved).manifest,
        old=update.old,
        arenas=update.arenas,
        runner=update.runner,
        rollback=update.rollback,
        has_checksums=update.has_checksums,
        has_graphs=Tag.GRAPH in update.brings,
        copy_speed=update.copy_speed,
    )
    return choose(weighed.facts())


def _refuse_copies(plan: Plan, version: WeightVersion) -> None:
    refused = [p for p in plan.parameters if p.alias is None]
    if refused:
        named = ", ".join(f"{p.name} ({p.why_not_alias})" for p in refused[:_MAX_NAMED])
        more = f" and {len(refused) - _MAX_NAMED} more" if len(refused) > _MAX_NAMED else ""
        raise NotAliasableError(
            f"rank {plan.rank}, version {version}: {len(refused)} of {len(plan.parameters)} parameters cannot alias "
            f"published memory: {named}{more}; publish them as the engine holds them, or use --apply-mode alias"
        )


def unstage(update: RankUpdate) -> None:
    """Lets everything go that this update took, each thing whatever becomes of the others; may be called again."""
    if update.is_installed:
        raise StepFailedError(f"rank {update.runner.rank}: what install needs to be undone stays until that is done")
    new, update.new, update.prepared = update.new, None, None
    update.not_aliased = {}
    if new is not None:
        new.views = {}
    with contextlib.ExitStack() as releasing:
        releasing.callback(_return_memory, update)
        releasing.callback(_release_staged, update)
        releasing.callback(_release_way_back, update)
        releasing.callback(_release_arena, update)


def _release_arena(update: RankUpdate) -> None:
    if update.arena is not None:
        update.arenas.release(update.arena)
        update.arena = None


def _release_way_back(update: RankUpdate) -> None:
    if update.way_back is not None:
        update.way_back.release()
        update.way_back = None


def _release_staged(update: RankUpdate) -> None:
    if update.staged is not None:
        update.staged.release()
        update.staged = None


def _return_memory(update: RankUpdate) -> None:
    """What is kept only to be quicker next time: copying, a rank maps nothing but its own memory between updates; a
    cleared one has no memory at all."""
    if update.old is None:
        update.arenas.trim()
    if update.old is None or update.way == COPY:
        update.source.trim()


def _prepare_way_back(update: RankUpdate) -> None:
    """What is taken is noted at once: an error on the way leaves it to `unstage`, when nobody looks at it any more."""
    old, reason = _known(update.old), ""
    if update.rollback == OFF:
        update.way_back = NoWayBack()
        return
    if update.rollback == REFETCH:
        reason = _lease_former_version(update, old)
        if not reason:
            return
        _release_way_back(update)
    update.way_back = kept = KeptBytes.take(old, update.arenas, reason)
    kept.save(old, update.num_staging_threads, _pace(update))


def _lease_former_version(update: RankUpdate, old: LiveWeights) -> str:
    """Why it cannot be had; empty where it is held now."""
    try:
        update.way_back = former = FormerVersion.lease(old, update.source, update.plans, update.deadline_ns)
        former.check(old, update.num_staging_threads)
    except (TrainerError, WorldError) as error:
        return f"version {old.version} cannot be fetched again: {error}"
    return ""


def _stage_new_weights(update: RankUpdate) -> LiveWeights:
    """The weights as they will be: where they will lie, and the checksums that they must then have."""
    plan, manifest = _known(update.plan), _known(update.resolved).manifest
    tensors = {tensor.name: tensor for tensor in manifest.tensors}
    views = _known(update.old).views if update.copies_in_place else _places(update, plan)
    homes = {} if update.copies_in_place else {n: view for n, view in views.items() if view.mapping is update.arena}
    new = LiveWeights(update.version, manifest.content_digest, dict(views), read={}, live={})
    if update.has_checksums:
        sums = _receive(update, homes)
        new.read = dict.fromkeys(tensors, ZERO) | sums.read
        new.live = {parameter.name: sums.live[parameter.name] for parameter in plan.parameters}
    else:
        _receive_unchecked(update, homes)
        new.is_read_back = True  # there is nothing to compare it with
    return new


def _places(update: RankUpdate, plan: Plan) -> dict[str, TensorView]:
    """Where each parameter will live: in published memory, or in engine memory taken for the others."""
    may_alias = update.way in (ALIAS, ALIAS_STRICT)
    copied = copied_parameters(plan, may_alias=may_alias)
    if update.way != COPY:
        update.not_aliased = _why_not_aliased(update, plan, may_alias)
    if copied:
        update.arena = update.arenas.acquire(arena_bytes(copied))
    return placed(plan, copied, _known(update.staged).segments, update.arena)


def _why_not_aliased(update: RankUpdate, plan: Plan, may_alias: bool) -> dict[str, str]:
    """Parameters that are copied though another source, or another choice, might have spared that."""
    staged = _known(update.staged)
    why_not = NOT_IMMUTABLE if not staged.is_immutable else NOT_ASKED if staged.is_copied_unless_asked else NOT_CHOSEN
    copied = (p for p in plan.parameters if p.alias is None or (p.num_bytes and not may_alias))
    return {p.name: p.why_not_alias or why_not for p in copied}


def _receive(update: RankUpdate, homes: dict[str, TensorView]) -> Sums:
    staged, manifest = _known(update.staged), _known(update.resolved).manifest
    arrivals = TimedArrivals(readable(staged, staged.arrivals(deadline_ns=update.deadline_ns)))
    started, pace = time.monotonic(), _pace(update)
    sums = transfer_arriving(arrivals, manifest, staged.segments, homes, update.num_staging_threads, pace)
    worked_s = time.monotonic() - started - arrivals.seconds - pace.rested_s
    update.copy_speed.note(_known(update.plan).read_bytes, worked_s)
    return sums


def _pace(update: RankUpdate) -> Pace:
    return Pace(lambda: update.runner.is_computing, update.deadline_ns)


def _receive_unchecked(update: RankUpdate, homes: dict[str, TensorView]) -> None:
    """Reads what has a home, and nothing else."""
    staged = _known(update.staged)
    arrivals = staged.arrivals(deadline_ns=update.deadline_ns)
    needed = ([parameter for parameter in batch if parameter.name in homes] for batch in arrivals)
    copy_arriving(readable(staged, needed), staged.segments, homes, update.num_staging_threads)


# --- vote: taken by the transaction together with the other ranks ----------------------------------


def do_nothing(update: RankUpdate) -> int:
    return 0


def undo_nothing(update: RankUpdate) -> None:
    """For steps that leave nothing behind, or what the undo of another step sees to."""


# --- drain: no forward pass reads the weights from here on -----------------------------------------


def drain(update: RankUpdate) -> int:
    update.had_kv_cache, update.had_graphs = update.runner.has_kv_cache, update.runner.has_graphs
    update.has_left_decoding = True
    update.runner.drain(update.deadline_ns)
    return 0


# --- install: a rebind, or a copy into the parameters' own memory ----------------------------------


def install(update: RankUpdate) -> int:
    new, plan = _known(update.new), _known(update.plan)
    update.is_installed = True
    if not update.copies_in_place:
        update.runner.bind(new.views)
        update.prepared = None
        return 0
    staged, manifest = _known(update.staged), _known(update.resolved).manifest
    sums = transfer_planned(plan.parameters, manifest, staged.segments, new.views, update.num_threads)
    check_sums(sums.live, new, update.runner.rank)
    return plan.copied_bytes + plan.aliased_bytes


def uninstall(update: RankUpdate) -> None:
    """Graphs hold for the addresses that are bound, so they too are brought back here and not before."""
    if not update.is_installed:
        return
    old, runner = update.old, update.runner
    if old is None:
        runner.unbind()
    elif update.copies_in_place:
        restore(_known(update.way_back), old, runner.rank, update.num_threads)
    else:
        runner.bind(old.views)
        check_bound(runner, old)
    if update.is_recaptured or update.had_graphs:
        _graphs_of_before(update)
    update.is_recaptured = update.is_installed = False


def _graphs_of_before(update: RankUpdate) -> None:
    """Also where no step captured any: a bind that broke off may have put those of the old weights out of use."""
    if update.old is None or not update.had_graphs:
        update.runner.drop_graphs()
    else:
        update.runner.recapture_graphs()


# --- verify: what is bound is what was staged ------------------------------------------------------


def verify(update: RankUpdate) -> int:
    """By reading back what apply mode copy copied. Else by place: to nobody's knowledge is that memory written since
    `stage` filled it, or summed it up; `live_weights.audit` reads it when the engine serves again."""
    new = _known(update.new)
    check_bound(update.runner, new)
    if update.way != COPY:
        return 0
    check_sums(live_checksums(new.views, update.num_threads), new, update.runner.rank)
    new.is_read_back = True
    return sum(view.num_bytes for view in new.views.values())


def check_bound(runner: ModelRunner, weights: LiveWeights) -> None:
    """StepFailedError where the runner's parameters lie elsewhere than the version's, ChecksumMismatchError where they
    hold other bytes."""
    bound = runner.bound()
    astray = [name for name, view in weights.views.items() if name not in bound or not view.same_place(bound[name])]
    if astray or len(bound) != len(weights.views):
        raise StepFailedError(
            f"rank {runner.rank}: {len(astray)} parameters are not bound to version {weights.version}, "
            f"first {astray[:1]}"
        )
    runner.verify_bound()


# --- rebuild_kv_cache, recapture_graphs: what the engine derived from the old weights --------------


def rebuild_kv_cache(update: RankUpdate) -> int:
    """Or keep it, where that is wanted, for the requests in flight alone: also where the weights that filled it are
    gone. One that sleeps stays away."""
    if Tag.KV_CACHE not in update.brings:
        return 0
    update.is_kv_touched = True
    digest = _known(update.new).content_digest
    if update.kv_policy == KEEP:
        update.runner.keep_kv_cache(digest)
    else:
        update.runner.rebuild_kv_cache(digest)
    return 0


def restore_kv_cache(update: RankUpdate) -> None:
    """A cache that was kept is the old weights' again. One that was rebuilt is empty: what it held is lost, and kept
    requests compute theirs anew. Pages are handed out for all ranks by one: where another rank may have lost its part
    of them, this one's is lost as well."""
    is_whole = update.kv_policy == KEEP or update.runner.num_ranks == 1
    if not update.has_left_decoding or (is_whole and not update.is_kv_touched) or Tag.KV_CACHE not in update.brings:
        return
    digest = update.asleep_digest if update.old is None else update.old.content_digest
    if not update.had_kv_cache:
        update.runner.drop_kv_cache()
    elif update.kv_policy == KEEP:
        update.runner.keep_kv_cache(digest)
    else:
        update.is_kv_lost = True
        update.runner.rebuild_kv_cache(digest)
    update.is_kv_touched = update.has_left_decoding = False


def recapture_graphs(update: RankUpdate) -> int:
    if Tag.GRAPH in update.brings:
        update.is_recaptured = True
        update.graphs_captured = update.runner.recapture_graphs()
    return 0


# --- commit: from here on tokens carry the new version ---------------------------------------------


ABORT_REASON = "the weights were updated"
"""What a request is told that an update aborts."""


def name_version(update: RankUpdate) -> int:
    """Requests are aborted no sooner, so that an update which comes to nothing aborts nobody."""
    if update.in_flight != KEEP:
        update.runner.abort_requests(ABORT_REASON, is_fault=False, begun=True)
    update.runner.set_version(str(_known(update.new).version))
    return 0


def name_old_version(update: RankUpdate) -> None:
    """Where nothing was live no token is made that could carry a version."""
    if update.old is not None:
        update.runner.set_version(str(update.old.version))


STAGING_STEPS = (
    UpdateStep("resolve", UpdateEvent.RESOLVE, resolve, forget),
    UpdateStep("stage", UpdateEvent.STAGE, stage, unstage),
    UpdateStep("vote", UpdateEvent.VOTE, do_nothing, undo_nothing),
)
"""While the engine serves."""
STALLING_STEPS = (
    UpdateStep("drain", UpdateEvent.DRAIN, drain, restore_kv_cache),
    UpdateStep("install", UpdateEvent.INSTALL, install, uninstall),
    UpdateStep("verify", UpdateEvent.VERIFY, verify, undo_nothing),
    UpdateStep("rebuild_kv_cache", UpdateEvent.REBUILD, rebuild_kv_cache, undo_nothing),
    UpdateStep("recapture_graphs", UpdateEvent.RECAPTURE, recapture_graphs, undo_nothing),
    UpdateStep("commit", UpdateEvent.COMMIT, name_version, name_old_version),
)
"""At a decode boundary; the time from the first to the last is the stall."""


_Value = TypeVar("_Value")


def _known(value: _Value | None) -> _Value:
    """What an earlier step filled in."""
    if value is None:
        raise StepFailedError("a step ran before the one that prepares it")
    return value
