"""A group of models is a runner like any other: the common suite, with two of each kind; and what only a group has."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from model_runner_suite import ModelRunnerSuite, Subject, Views, go_live, version
from test_embedded_model_runner import EmbeddedSubject
from test_numpy_runner import MODEL, NumpySubject

from fastdeploy_rl import ModelGroup
from fastdeploy_rl.coverage import Coverage, FusedPart, ParameterSpec
from fastdeploy_rl.engines.numpy.runner import NumpyModel, NumpyRunner
from fastdeploy_rl.errors import ConfigurationError, CoverageError
from fastdeploy_rl.runner import ModelRunner
from tests.engines.tiny_llama import EmbeddedRunner, make_checkpoint

DRAFT = NumpyModel(
    (
        ParameterSpec("norm", "F32", (5,), None),
        ParameterSpec("bias", "F32", (5,), None),
        ParameterSpec("qk", "F32", (5, 6), 1, fused=(FusedPart("q", 3), FusedPart("k", 3)), fused_axis=1),
        ParameterSpec("qk_again", "F32", (5, 6), 1, Coverage.TIED, "qk", fused=(FusedPart("r", 3), FusedPart("s", 3)),
                      fused_axis=1),
        ParameterSpec("rope", "F32", (8,), None, Coverage.TRANSIENT),
    )
)  # fmt: skip


@dataclass(frozen=True)
class GroupSubject:
    runner: ModelGroup
    members: tuple[Subject, ...]

    def answer(self) -> bytes:
        return b"".join(member.answer() for member in self.members)

    def version_of_a_token(self) -> str:
        (only,) = {member.version_of_a_token() for member in self.members}
        return only


def numpy_group(rank: int, num_ranks: int) -> GroupSubject:
    main, draft = NumpyRunner(MODEL, rank, num_ranks), NumpyRunner(DRAFT, rank, num_ranks)
    return GroupSubject(ModelGroup(main, draft=draft), (NumpySubject(main), NumpySubject(draft)))


class TestGroupOfNumpyRunners(ModelRunnerSuite):
    @pytest.fixture(params=[(0, 1), (1, 3)], ids=["alone", "rank 1 of 3"])
    def subject(self, request: pytest.FixtureRequest) -> GroupSubject:
        return numpy_group(*request.param)


class TestGroupWithAFrozenMember(ModelRunnerSuite):
    @pytest.fixture
    def subject(self) -> GroupSubject:
        main, draft = NumpyRunner(MODEL, 0, 1), NumpyRunner(DRAFT, 0, 1)
        draft.load(1)
        draft.rebuild_kv_cache("0" * 64)
        draft.recapture_graphs()  # its own graphs are there before the first update, and stay
        draft.drop_kv_cache()
        return GroupSubject(ModelGroup(main, draft=draft, frozen={"draft"}), (NumpySubject(main), NumpySubject(draft)))


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    main = make_checkpoint(root / "main", tie_word_embeddings=True, num_key_value_heads=3)
    return main, make_checkpoint(root / "draft", seed=1, num_hidden_layers=1, num_key_value_heads=3)


class TestGroupOfEmbeddedRunners(ModelRunnerSuite):
    """As an engine has them: a tied main model, and a draft model of one layer beside it."""

    @pytest.fixture
    def subject(self, directories: tuple[Path, Path]) -> GroupSubject:
        main, draft = (EmbeddedRunner(directory, 0, 1, None) for directory in directories)
        return GroupSubject(ModelGroup(main, draft=draft), (EmbeddedSubject(main), EmbeddedSubject(draft)))


# --- names ------------------------------------------------------------------------------------------


def test_the_main_models_names_stay_bare_and_the_drafts_are_in_its_namespace() -> None:
    specs = {spec.name: spec for spec in numpy_group(0, 1).runner.parameters()}
    assert list(specs) == [spec.name for spec in MODEL.specs] + [f"draft/{spec.name}" for spec in DRAFT.specs]
    assert [specs[spec.name] for spec in MODEL.specs] == list(MODEL.specs)
    qk, again = specs["draft/qk"], specs["draft/qk_again"]
    assert [part.name for part in qk.fused] == ["draft/q", "draft/k"]
    assert (again.tied_to, [part.name for part in again.fused]) == ("draft/qk", ["draft/r", "draft/s"])
    assert specs["draft/rope"].coverage is Coverage.TRANSIENT


def test_equal_names_in_two_models_are_two_tensors() -> None:
    subject = numpy_group(0, 1)
    main, draft = members(subject)
    views = version(subject.runner, 1)
    go_live(subject, views)
    assert main.bound()["norm"].same_place(views["norm"])
    assert draft.bound()["norm"].same_place(views["draft/norm"])
    assert not views["norm"].same_place(views["draft/norm"])


def test_the_order_of_members_is_that_of_their_names() -> None:
    """Every rank, and every start, has the same order, in whichever the members were given."""
    main, b, a = (NumpyRunner(DRAFT, 0, 1) for _ in range(3))
    names = [spec.name for spec in ModelGroup(main, b=b, a=a).parameters()]
    assert names == [spec.name for spec in ModelGroup(main, a=a, b=b).parameters()]
    assert names[:: len(DRAFT.specs)] == ["norm", "a/norm", "b/norm"]


@pytest.mark.parametrize("namespace", ["", "a/b", "/"])
def test_a_namespace_that_could_be_mistaken_is_refused(namespace: str) -> None:
    with pytest.raises(ConfigurationError, match="namespace"):
        ModelGroup(NumpyRunner(MODEL, 0, 1), **{namespace: NumpyRunner(DRAFT, 0, 1)})


@pytest.mark.parametrize("place", ["main", "draft", "part"])
def test_a_parameter_that_could_be_mistaken_for_another_models_is_refused(place: str) -> None:
    names = NumpyModel((ParameterSpec("draft/norm", "F32", (5,), None),))
    parts = NumpyModel((ParameterSpec("qk", "F32", (4,), None, fused=(FusedPart("q/q", 2), FusedPart("k", 2))),))
    main = NumpyRunner(names if place == "main" else MODEL, 0, 1)
    draft = NumpyRunner({"main": DRAFT, "draft": names, "part": parts}[place], 0, 1)
    with pytest.raises(ConfigurationError, match=r"draft/norm|q/q"):
        ModelGroup(main, draft=draft)


@pytest.mark.parametrize("seat", [(0, 3), (1, 2)])
def test_members_of_other_ranks_are_refused(seat: tuple[int, int]) -> None:
    with pytest.raises(ConfigurationError, match=r"'draft' is rank \d of \d, the main model rank 1 of 3"):
        ModelGroup(NumpyRunner(MODEL, 1, 3), draft=NumpyRunner(DRAFT, *seat))


def test_a_frozen_model_that_is_no_member_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="drafd"):
        ModelGroup(NumpyRunner(MODEL, 0, 1), draft=NumpyRunner(DRAFT, 0, 1), frozen={"drafd"})


# --- one bind in each, in all of them or in none ----------------------------------------------------


def members(subject: GroupSubject) -> tuple[NumpyRunner, NumpyRunner]:
    main, draft = (member.runner for member in subject.members)
    assert isinstance(main, NumpyRunner)
    assert isinstance(draft, NumpyRunner)
    return main, draft


def break_half_way(runner: NumpyRunner) -> Callable[[Views], None]:
    """A bind that leaves one parameter bound to new memory, once."""

    def bind(views: Views) -> None:
        del runner.bind
        first = next(iter(views))
        runner.bind(dict(runner.bound()) | {first: views[first]})
        raise RuntimeError("half way")

    return bind


def test_every_call_reaches_every_member_once() -> None:
    """Whatever a runner derives from its weights, it derives once a bind."""
    subject = numpy_group(0, 1)
    go_live(subject, version(subject.runner, 1), "1.1")
    subject.runner.keep_kv_cache("0" * 64)
    subject.runner.abort_requests("why")
    subject.runner.drop_kv_cache()
    subject.runner.drop_graphs()
    subject.runner.unbind()
    main, draft = members(subject)
    expected = ["drain", "bind", "rebuild_kv_cache", "recapture_graphs", "version 1.1", "keep_kv_cache", "abort why"]
    assert main.calls == draft.calls == [*expected, "drop_kv_cache", "drop_graphs", "unbind"]


def test_what_is_counted_and_estimated_is_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = numpy_group(0, 1)
    views = version(subject.runner, 1)
    seen: list[set[str]] = []
    for number, runner in enumerate(members(subject), 1):
        monkeypatch.setattr(runner, "num_requests", lambda *, begun, n=number: n + 10 * begun)
        monkeypatch.setattr(runner, "recapture_graphs", lambda n=number: n)
        monkeypatch.setattr(runner, "recapture_seconds", lambda own, n=number: seen.append(set(own)) or float(n))
    assert (subject.runner.num_requests(), subject.runner.num_requests(begun=True)) == (3, 23)
    assert subject.runner.recapture_graphs() == 3
    assert subject.runner.recapture_seconds(views) == 3.0
    assert seen == [{"embed", "up", "norm", "bias", "scale", "empty"}, {"norm", "bias", "qk"}]


class Bare(NumpyRunner):
    """It keeps no KV cache and captures no graphs, whatever it is asked for."""

    has_kv_cache = property(lambda self: False)  # type: ignore[assignment]
    has_graphs = property(lambda self: False)  # type: ignore[assignment]


def test_a_member_that_has_no_cache_or_graphs_at_all_does_not_hide_those_of_the_others() -> None:
    """An undo brings back what it finds named, and drops the rest."""
    main, draft = NumpyRunner(MODEL, 0, 1), Bare(DRAFT, 0, 1)
    subject = GroupSubject(ModelGroup(main, draft=draft), (NumpySubject(main), NumpySubject(draft)))
    go_live(subject, version(subject.runner, 1), "1.1")
    assert (subject.runner.has_kv_cache, subject.runner.has_graphs) == (True, True)
    subject.runner.drop_graphs()
    assert (subject.runner.has_kv_cache, subject.runner.has_graphs) == (True, False)
    subject.runner.drop_kv_cache()
    assert not subject.runner.has_kv_cache


@pytest.mark.parametrize("was_bound", [True, False], ids=["bound before", "nothing bound before"])
@pytest.mark.parametrize("broken", [0, 1], ids=["main breaks", "draft breaks"])
def test_a_member_that_cannot_bind_leaves_all_where_they_were(broken: int, was_bound: bool) -> None:
    """Also the one whose bind broke off half way; and the next bind takes."""
    subject = numpy_group(0, 1)
    old, new = version(subject.runner, 1), version(subject.runner, 2)
    before = go_live(subject, old) if was_bound else b""
    runner = members(subject)[broken]
    runner.bind = break_half_way(runner)
    with pytest.raises(RuntimeError, match="half way"):
        subject.runner.bind(new)
    bound = subject.runner.bound()
    assert bound.keys() == (old.keys() if was_bound else set())
    assert all(bound[name].same_place(old[name]) for name in bound)
    assert not was_bound or subject.answer() == before
    assert go_live(subject, new, "1.2") == go_live(numpy_group(0, 1), version(subject.runner, 2), "1.2")


@pytest.mark.parametrize("change", ["draft/bias", "norm", "more"])
def test_views_of_a_part_of_the_models_are_refused_before_any_is_touched(change: str) -> None:
    subject = numpy_group(0, 1)
    go_live(subject, version(subject.runner, 1))
    main, draft = members(subject)
    calls = [*main.calls], [*draft.calls]
    views = version(subject.runner, 2)
    if change == "more":
        views["draft/more"] = views["norm"]
    else:
        del views[change]
    with pytest.raises(CoverageError, match=change):
        subject.runner.bind(views)
    assert (main.calls, draft.calls) == calls


# --- frozen members -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["declared", "by its own parameters"])
def test_a_frozen_member_is_bound_once_and_never_touched_again(how: str) -> None:
    main = NumpyRunner(MODEL, 0, 1)
    all_frozen = tuple(replace(spec, coverage=Coverage.FROZEN, tied_to=None) for spec in DRAFT.specs)
    draft = NumpyRunner(DRAFT if how == "declared" else NumpyModel(all_frozen), 0, 1)
    draft.load(3)
    held = draft.bound()
    group: ModelRunner = ModelGroup(main, draft=draft, frozen={"draft"} if how == "declared" else ())
    frozen = [spec for spec in group.parameters() if spec.coverage is Coverage.FROZEN]
    assert [spec.name for spec in frozen][:3] == ["draft/norm", "draft/bias", "draft/qk"]
    assert [spec.tied_to for spec in frozen] == [None] * len(frozen)
    subject = GroupSubject(group, (NumpySubject(main),))
    for seed in (1, 2):
        views = version(group, seed)
        assert not [name for name in views if name.startswith("draft/")]
        go_live(subject, views)
        assert group.bound().keys() == views.keys()
        group.unbind()
    assert draft.bound() == held
    assert [call for call in draft.calls if "bind" in call] == ["bind"]
    assert main.calls.count("bind") == 2


def test_embedded_members_answer_as_each_does_alone(directories: tuple[Path, Path]) -> None:
    main, draft = (EmbeddedRunner(directory, 0, 1, None) for directory in directories)
    group = ModelGroup(main, draft=draft)
    views = version(group, 1)
    together = go_live(GroupSubject(group, (EmbeddedSubject(main), EmbeddedSubject(draft))), views)
    apart = b""
    for directory, prefix in zip(directories, ("", "draft/"), strict=True):
        alone = EmbeddedRunner(directory, 0, 1, None)
        own = {name.removeprefix(prefix): view for name, view in views.items() if ("/" in name) == bool(prefix)}
        apart += go_live(EmbeddedSubject(alone), own)
    assert together == apart
