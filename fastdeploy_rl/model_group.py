"""Several models under one weight manager: a main model and those beside it, such as a draft or an MTP model.

Owns their names (the main model's stay bare, those of member "draft" are `draft/NAME`), the order in which they are
called, and that a bind takes hold in all of them or in none. Refuses to know what the models compute and what they do
for each other. Invariant: when a call has returned or raised, the members that updates reach are all bound to what was
given together, or all to what they had before."""

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from fastdeploy_rl.coverage import Coverage, ParameterSpec
from fastdeploy_rl.errors import ConfigurationError, CoverageError
from fastdeploy_rl.memory.tensor_view import TensorView
from fastdeploy_rl.plan import namespaces
from fastdeploy_rl.runner import ModelRunner

_log = logging.getLogger(__name__)

Views = dict[str, TensorView]
_FED = (Coverage.UPDATED, Coverage.TIED)
_MAX_NAMED = 5


class ModelGroup:
    """Satisfies `ModelRunner`, of which it is one made of several: give it to the weight manager in their place.

        ModelGroup(main_runner, draft=draft_runner)
        ModelGroup(main_runner, draft=draft_runner, frozen={"draft"})

    Every call reaches the main model first, then the others by name. A member of `frozen`, and one without an updated
    parameter, is the engine's to bind, once, when it starts: an update neither asks for its tensors nor binds it again,
    and `unbind` leaves it bound. Its KV cache, graphs and requests are those of the group: they follow every call.
    """

    def __init__(self, main: ModelRunner, /, *, frozen: Collection[str] = (), **others: ModelRunner) -> None:
        """ConfigurationError: members that are of different ranks, a namespace or a parameter with "/" in its name, a
        frozen one that is no member."""
        for namespace in others:
            namespaces.check_namespace(namespace)
        strangers = set(frozen) - others.keys()
        if strangers:
            raise ConfigurationError(f"frozen {sorted(strangers)}: the models beside the main one are {sorted(others)}")
        runners = {namespaces.MAIN: main, **dict(sorted(others.items()))}
        self._members = tuple(_member(name, runner, name in frozen) for name, runner in runners.items())
        self._updated = tuple(member for member in self._members if not member.is_frozen)
        self._rank, self._num_ranks = main.rank, main.num_ranks
        for member in self._members:
            if (member.runner.rank, member.runner.num_ranks) != (self._rank, self._num_ranks):
                raise ConfigurationError(
                    f"{member.title} is rank {member.runner.rank} of {member.runner.num_ranks}, "
                    f"the main model rank {self._rank} of {self._num_ranks}"
                )
        self._specs = tuple(spec for member in self._members for spec in member.specs)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def num_ranks(self) -> int:
        return self._num_ranks

    # --- weights ----------------------------------------------------------------------------------------------

    def parameters(self) -> Sequence[ParameterSpec]:
        return self._specs

    def bound(self) -> Mapping[str, TensorView]:
        """Of the members that updates reach. Once each member is bound to what it starts with, this is what the manager
        starts with (`InitialWeights`)."""
        return {name: view for member in self._updated for name, view in member.bound().items()}

    def prepare(self, views: Mapping[str, TensorView]) -> object:
        shares = self._shares(views)
        return [member.runner.prepare(shares[member.namespace]) for member in self._updated]

    def bind(self, views: Mapping[str, TensorView]) -> None:
        """Each member once. CoverageError, before any is touched, unless `views` are the parameters of all. Where a
        member raises, it and those before it are bound to what they had, and the error is raised."""
        shares = self._shares(views)
        with ExitStack() as going_back:
            for member in self._updated:
                going_back.callback(member.put_back, member.runner.bound())
                member.runner.bind(shares[member.namespace])
            going_back.pop_all()

    @property
    def fills_parameters(self) -> bool:
        return any(member.runner.fills_parameters for member in self._updated)

    def verify_bound(self) -> None:
        for member in self._updated:
            member.runner.verify_bound()

    def unbind(self) -> None:
        for member in self._updated:
            member.runner.unbind()

    def _shares(self, views: Mapping[str, TensorView]) -> dict[str, Views]:
        """What is each member's, under the member's own names."""
        expected = {spec.name for spec in self._specs if spec.coverage is Coverage.UPDATED}
        wrong = sorted(expected ^ views.keys())
        if wrong:
            raise CoverageError(
                f"rank {self._rank}: what is to be bound does not fit these models: "
                + ", ".join(f"{name} {'missing' if name in expected else 'unknown'}" for name in wrong[:_MAX_NAMED])
                + (f" and {len(wrong) - _MAX_NAMED} more" if len(wrong) > _MAX_NAMED else "")
            )
        shares: dict[str, Views] = {member.namespace: {} for member in self._members}
        for full_name, view in views.items():
            namespace, name = namespaces.split(full_name)
            shares[namespace][name] = view
        return shares

    # --- requests ---------------------------------------------------------------------------------------------

    def drain(self, deadline_ns: int) -> None:
        for member in self._members:
            member.runner.drain(deadline_ns)

    @property
    def is_computing(self) -> bool:
        return any(member.runner.is_computing for member in self._members)

    def num_requests(self, *, begun: bool = False) -> int:
        """The sum: a member that keeps no account of requests has none."""
        return sum(member.runner.num_requests(begun=begun) for member in self._members)

    def abort_requests(self, reason: str, *, is_fault: bool = True, begun: bool = False) -> None:
        for member in self._members:
            member.runner.abort_requests(reason, is_fault=is_fault, begun=begun)

    # --- what is derived from the weights ---------------------------------------------------------------------

    @property
    def has_kv_cache(self) -> bool:
        """Of some member: one may have none in any case."""
        return any(member.runner.has_kv_cache for member in self._members)

    def drop_kv_cache(self) -> None:
        for member in self._members:
            member.runner.drop_kv_cache()

    def rebuild_kv_cache(self, content_digest: str) -> None:
        """The digest is that of all models together, a frozen one's cache gets it too: what it cached goes along with
        tokens of the others."""
        for member in self._members:
            member.runner.rebuild_kv_cache(content_digest)

    def keep_kv_cache(self, content_digest: str) -> None:
        for member in self._members:
            member.runner.keep_kv_cache(content_digest)

    def recapture_graphs(self) -> int:
        """Of all members; a frozen one's addresses stay, so that it captures only what was dropped."""
        return sum(member.runner.recapture_graphs() for member in self._members)

    @property
    def has_graphs(self) -> bool:
        """Of some member: one may have none in any case."""
        return any(member.runner.has_graphs for member in self._members)

    def drop_graphs(self) -> None:
        for member in self._members:
            member.runner.drop_graphs()

    def recapture_seconds(self, views: Mapping[str, TensorView]) -> float:
        """No views stand for memory that no member was ever bound to."""
        shares: dict[str, Views] = self._shares(views) if views else {member.namespace: {} for member in self._members}
        return sum(
            member.runner.recapture_seconds(member.runner.bound() if member.is_frozen else shares[member.namespace])
            for member in self._members
        )

    def set_version(self, version: str) -> None:
        for member in self._members:
            member.runner.set_version(version)


@dataclass(frozen=True)
class _Member:
    """`specs`: with the group's names. `is_frozen`: no update binds it."""

    namespace: str
    runner: ModelRunner
    specs: tuple[ParameterSpec, ...]

    @property
    def is_frozen(self) -> bool:
        return all(spec.coverage is not Coverage.UPDATED for spec in self.specs)

    @property
    def title(self) -> str:
        return f"model {self.namespace!r}" if self.namespace else "the main model"

    def bound(self) -> Views:
        return {namespaces.join(self.namespace, name): view for name, view in self.runner.bound().items()}

    def put_back(self, views: Mapping[str, TensorView]) -> None:
        """Undoes a bind, also one that broke off half way."""
        _log.warning("event=put_back rank=%d model=%r", self.runner.rank, self.namespace)
        if views:
            self.runner.bind(views)
        else:
            self.runner.unbind()


def _member(namespace: str, runner: ModelRunner, is_frozen: bool) -> _Member:
    specs = runner.parameters()
    for name in (name for spec in specs for name in (spec.name, *(part.name for part in spec.fused))):
        if not namespaces.is_bare(name):
            raise ConfigurationError(f"{name}: '/' in a parameter's name would say that it is of another model")
    return _Member(namespace, runner, tuple(_as_in_group(spec, namespace, is_frozen) for spec in specs))


def _as_in_group(spec: ParameterSpec, namespace: str, is_frozen: bool) -> ParameterSpec:
    tied_to = None if spec.tied_to is None else namespaces.resolve(namespace, spec.tied_to)
    moved = replace(
        spec,
        name=namespaces.join(namespace, spec.name),
        tied_to=tied_to,
        fused=tuple(replace(part, name=namespaces.join(namespace, part.name)) for part in spec.fused),
    )
    if is_frozen and spec.coverage in _FED:
        return replace(moved, coverage=Coverage.FROZEN, tied_to=None)
    return moved
