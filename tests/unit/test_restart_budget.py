"""How many deaths an engine gets over: hypothesis for what a window of time allows, cases for what ends it."""

from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_rl.engines.embedded.restart_budget import DEATHS_WITHIN_S, MAX_DEATHS, RestartBudget


def test_one_death_more_than_the_budget_ends_the_engine_whichever_ranks_died() -> None:
    budget = RestartBudget()
    for rank in range(MAX_DEATHS):
        assert budget.note_death(rank, 10.0 + rank, was_ready=True) == ""
    assert budget.note_death(0, 20.0, was_ready=True) == "ranks died 4 times within 300 s"


def test_a_rank_that_never_gets_ready_again_ends_the_engine_at_the_second_death() -> None:
    budget = RestartBudget()
    assert budget.note_death(1, 0.0, was_ready=True) == ""
    assert budget.note_death(1, 1.0, was_ready=False) == ""
    assert budget.note_death(1, 2.0, was_ready=False) == "rank 1 died 2 times in a row before it was ready again"


def test_deaths_at_the_start_count_for_each_rank_and_only_in_a_row() -> None:
    budget = RestartBudget(max_deaths=100)
    for now_s in range(10):
        assert budget.note_death(now_s % 2, float(now_s), was_ready=now_s % 4 > 1) == ""


@given(st.lists(st.floats(DEATHS_WITHIN_S / MAX_DEATHS + 1e-3, 1e6), max_size=30))
def test_deaths_that_come_now_and_then_never_end_it(gaps_s: list[float]) -> None:
    budget, now_s = RestartBudget(), 0.0
    for gap_s in gaps_s:
        now_s += gap_s
        assert budget.note_death(0, now_s, was_ready=True) == ""
