"""In which order DeepEP's buffers and Paddle's process groups go and come with the weights: fakes stand for what only a
CUDA machine has, and note what is called."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import paddle
import pytest

from fastdeploy_rl.engines.fastdeploy.expert_parallel import ExpertParallel
from fastdeploy_rl.errors import DeadlineExceededError

TP, EP = "tp group", "ep group"


class Recorder:
    """`is_alone`: no other rank comes to a meeting. `refuses`: a call that fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.is_alone, self.refuses = False, ""
        module = ModuleType("fastdeploy.model_executor.layers.moe.ep")
        note = self.calls.append
        module.DeepEPBufferManager = SimpleNamespace(  # type: ignore[attr-defined]
            clear_buffer=lambda: note("clear buffer"), recreate_buffer=lambda: note("recreate buffer")
        )
        path = module.__name__.split(".")
        for depth in range(1, len(path)):
            monkeypatch.setitem(sys.modules, ".".join(path[:depth]), ModuleType(".".join(path[:depth])))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        for verb in ("shutdown", "restart"):
            monkeypatch.setattr(
                paddle.distributed,
                f"{verb}_process_group",
                lambda group="world", verb=verb: self._note(f"{verb} {group}"),
            )

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.refuses:
            raise RuntimeError("it will not")

    def meet(self) -> None:
        self.calls.append("meet")
        if self.is_alone:
            raise DeadlineExceededError.waiting_for("meeting of the ranks", since_s=0.0, missing=[1])

    def take(self) -> list[str]:
        taken, self.calls[:] = list(self.calls), []
        return taken


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def expert_parallel(recorder: Recorder, **fields: Any) -> ExpertParallel:
    config = {
        "enable_expert_parallel": True,
        "shutdown_comm_group_if_worker_idle": True,
        "tensor_parallel_size": 2,
        "tp_group": TP,
        "ep_group": EP,
        **fields,
    }
    return ExpertParallel(SimpleNamespace(**config), recorder.meet)


def go_and_come(recorder: Recorder, subject: ExpertParallel) -> tuple[list[str], list[str]]:
    with subject.standing_still():
        subject.clear_buffer()
        recorder.calls.append("weights freed")
        subject.weights_are_gone()
    gone = recorder.take()
    subject.restart_groups()
    subject.recreate_buffer()
    recorder.calls.append("weights bound")
    return gone, recorder.take()


def test_buffers_go_before_weights_and_groups_after_and_back_in_the_other_order(recorder: Recorder) -> None:
    subject = expert_parallel(recorder)
    for _ in range(2):
        gone, come = go_and_come(recorder, subject)
        groups = [f"shutdown {group}" for group in (EP, TP, "world")]
        assert gone == ["clear buffer", "meet", "weights freed", "meet", *groups]
        groups = [f"restart {group}" for group in ("world", TP, EP)]
        assert come == [*groups, "recreate buffer", "meet", "weights bound"]


def test_each_takes_effect_once(recorder: Recorder) -> None:
    subject = expert_parallel(recorder)
    subject.restart_groups()
    subject.recreate_buffer()
    assert recorder.take() == []
    for call in (subject.clear_buffer, subject.shut_down_groups, subject.restart_groups, subject.recreate_buffer):
        call()
        assert recorder.take() != []
        call()
        assert recorder.take() == []


def test_without_expert_parallelism_there_is_no_buffer_and_no_group_of_it(recorder: Recorder) -> None:
    gone, come = go_and_come(recorder, expert_parallel(recorder, enable_expert_parallel=False))
    assert gone == ["weights freed", "meet", f"shutdown {TP}", "shutdown world"]
    assert come == ["restart world", f"restart {TP}", "weights bound"]


@pytest.mark.parametrize("is_idle_kept", [True, False])
def test_groups_stay_where_the_loop_turns_or_fastdeploy_was_told_so(recorder: Recorder, is_idle_kept: bool) -> None:
    subject = expert_parallel(recorder, shutdown_comm_group_if_worker_idle=not is_idle_kept)
    if is_idle_kept:
        assert go_and_come(recorder, subject)[0] == ["clear buffer", "meet", "weights freed"]
    else:
        subject.weights_are_gone()
    assert not any("shutdown" in call or "restart" in call for call in recorder.take())


def test_who_is_alone_frees_and_does_not_go_on_to_new_weights(recorder: Recorder) -> None:
    recorder.is_alone = True
    subject = expert_parallel(recorder)
    with subject.standing_still():
        subject.clear_buffer()
        subject.weights_are_gone()
    gone = recorder.take()
    assert {"clear buffer", f"shutdown {EP}"} <= set(gone)
    with pytest.raises(DeadlineExceededError, match=r"ranks \[1\] missing"):
        subject.recreate_buffer()


def test_a_group_that_will_not_go_leaves_those_before_it_down_and_they_come_back(recorder: Recorder) -> None:
    subject = expert_parallel(recorder)
    recorder.refuses = f"shutdown {TP}"
    with subject.standing_still():
        subject.weights_are_gone()
    assert recorder.take() == ["meet", f"shutdown {EP}", f"shutdown {TP}"]
    recorder.refuses = ""
    subject.restart_groups()
    assert recorder.take() == [f"restart {EP}"]


def test_a_rank_whose_buffer_did_not_come_has_all_of_them_make_theirs_anew(recorder: Recorder) -> None:
    subject = expert_parallel(recorder)
    subject.clear_buffer()
    recorder.take()
    recorder.is_alone = True
    with pytest.raises(DeadlineExceededError):
        subject.recreate_buffer()
    recorder.is_alone = False
    subject.recreate_buffer()
    assert recorder.take().count("recreate buffer") == 2
