"""What every meeting place of an engine's ranks must do: inherit `RendezvousSuite`, give it one fixture."""

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from fastdeploy_rl.board.layout import Ballot, CommandRecord, Decision
from fastdeploy_rl.board.rendezvous import Question, Rendezvous
from fastdeploy_rl.errors import DeadlineExceededError, LifecycleError, PeerLostError

_T = TypeVar("_T")
QUESTIONS = tuple(Question)


def in_s(seconds: float) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


def soon() -> int:
    """A deadline that only a hanging test reaches."""
    return in_s(30)


def at_once() -> int:
    """A deadline that has just passed."""
    return time.monotonic_ns()


def command(number: int) -> CommandRecord:
    return CommandRecord(number, kind=1, epoch=2, step=number, deadline_ns=7, content_digest="cd" * 32)


def together(seats: Sequence[Rendezvous], act: Callable[[Rendezvous], _T]) -> list[_T]:
    """Every rank acts at the same time; results in rank order."""
    with ThreadPoolExecutor(len(seats)) as pool:
        return list(pool.map(act, seats))


class RendezvousSuite:
    """Fixture to provide: `seats`, one for each of three ranks of a fresh engine, in rank order."""

    # --- commands ----------------------------------------------------------------------------------

    def test_ranks_know_their_number(self, seats: Sequence[Rendezvous]) -> None:
        assert [(seat.rank, seat.num_ranks) for seat in seats] == [(0, 3), (1, 3), (2, 3)]

    def test_nothing_is_announced_at_first(self, seats: Sequence[Rendezvous]) -> None:
        assert [seat.current().number for seat in seats] == [0, 0, 0]
        assert [seat.await_command(0, at_once()) for seat in seats] == [None, None, None]

    def test_a_command_reaches_every_rank_as_it_was_announced(self, seats: Sequence[Rendezvous]) -> None:
        seats[0].announce(command(1))
        assert [seat.await_command(0, soon()) for seat in seats] == [command(1)] * 3
        assert [seat.current() for seat in seats] == [command(1)] * 3

    def test_a_rank_that_waits_is_woken_by_the_command(self, seats: Sequence[Rendezvous]) -> None:
        def meet(seat: Rendezvous) -> CommandRecord | None:
            if seat.rank == 0:
                seat.announce(command(1))
            return seat.await_command(0, soon())

        assert together(seats, meet) == [command(1)] * 3

    def test_a_command_that_was_seen_is_not_given_again(self, seats: Sequence[Rendezvous]) -> None:
        seats[0].announce(command(1))
        assert seats[1].await_command(1, at_once()) is None
        seats[0].announce(command(2))
        assert seats[1].await_command(1, at_once()) == command(2)

    def test_who_is_wanted_elsewhere_stops_waiting_for_a_command(self, seats: Sequence[Rendezvous]) -> None:
        assert seats[1].await_command(0, soon(), is_wanted=lambda: True) is None
        seats[0].announce(command(1))
        assert seats[1].await_command(0, soon(), is_wanted=lambda: True) == command(1)

    # --- votes -------------------------------------------------------------------------------------

    def test_a_vote_is_settled_when_every_rank_came_that_far(self, seats: Sequence[Rendezvous]) -> None:
        for seat in seats:
            seat.vote(1, Ballot.STAGED)
        records = seats[0].await_votes(1, Ballot.STAGED, at_once())
        assert [(record.command, record.ballot) for record in records] == [(1, Ballot.STAGED)] * 3

    def test_who_waits_for_votes_is_woken_by_the_last(self, seats: Sequence[Rendezvous]) -> None:
        def vote(seat: Rendezvous) -> list[int]:
            seat.vote(1, Ballot.STAGED)
            return [record.ballot for record in seat.await_votes(1, Ballot.STAGED, soon())]

        assert together(seats, vote) == [[Ballot.STAGED] * 3] * 3

    def test_who_came_further_counts_for_less(self, seats: Sequence[Rendezvous]) -> None:
        for seat, ballot in zip(seats, (Ballot.VERIFIED, Ballot.STAGED, Ballot.FINISHED), strict=True):
            seat.vote(1, ballot)
        assert len(seats[0].await_votes(1, Ballot.STAGED, at_once())) == 3

    def test_silent_ranks_are_named(self, seats: Sequence[Rendezvous]) -> None:
        seats[1].vote(1, Ballot.STAGED)
        seats[2].vote(1, Ballot.STARTED)
        with pytest.raises(DeadlineExceededError, match=r"no vote STAGED of command 1 .*; ranks \[0, 2\] missing"):
            seats[0].await_votes(1, Ballot.STAGED, in_s(0.02))

    def test_votes_on_an_older_command_do_not_count(self, seats: Sequence[Rendezvous]) -> None:
        for seat in seats:
            seat.vote(1, Ballot.FINISHED)
        for seat in seats[:2]:
            seat.vote(2, Ballot.STAGED)
        with pytest.raises(DeadlineExceededError, match=r"ranks \[2\]"):
            seats[0].await_votes(2, Ballot.STAGED, at_once())

    @pytest.mark.parametrize(("against", "wanted"), [(Ballot.REFUSED, Ballot.STAGED), (Ballot.FAILED, Ballot.VERIFIED)])
    def test_one_rank_against_settles_the_vote_and_says_why(
        self, seats: Sequence[Rendezvous], against: Ballot, wanted: Ballot
    ) -> None:
        """Nobody waits for the others any more."""
        seats[1].vote(1, against, error="CoverageError", reason="no such tensor: é")
        records = seats[0].await_votes(1, wanted, at_once())
        assert (records[1].ballot, records[1].error, records[1].reason) == (
            against,
            "CoverageError",
            "no such tensor: é",
        )
        assert records[0].ballot == records[2].ballot == Ballot.NONE

    def test_finished_means_every_rank_also_those_against(self, seats: Sequence[Rendezvous]) -> None:
        seats[0].vote(1, Ballot.FINISHED)
        seats[1].vote(1, Ballot.REFUSED)
        seats[2].vote(1, Ballot.FINISHED)
        with pytest.raises(DeadlineExceededError, match="FINISHED"):
            seats[0].await_votes(1, Ballot.FINISHED, at_once())
        seats[1].vote(1, Ballot.FINISHED)
        assert len(seats[0].await_votes(1, Ballot.FINISHED, at_once())) == 3

    def test_a_new_vote_takes_back_the_reason_of_the_last(self, seats: Sequence[Rendezvous]) -> None:
        seats[1].vote(1, Ballot.REFUSED, error="CoverageError", reason="no such tensor")
        for seat in seats:
            seat.vote(2, Ballot.STAGED)
        records = seats[0].await_votes(2, Ballot.STAGED, at_once())
        assert [(record.error, record.reason) for record in records] == [("", "")] * 3

    # --- lost ranks --------------------------------------------------------------------------------

    def test_a_lost_rank_is_known_to_all_until_it_is_back(self, seats: Sequence[Rendezvous]) -> None:
        assert [seat.lost_ranks() for seat in seats] == [frozenset()] * 3
        seats[0].mark_lost(2)
        assert [seat.lost_ranks() for seat in seats] == [frozenset({2})] * 3
        seats[2].mark_back()
        assert [seat.lost_ranks() for seat in seats] == [frozenset()] * 3

    def test_nobody_waits_for_the_vote_of_a_lost_rank(self, seats: Sequence[Rendezvous]) -> None:
        """Whoever waits is woken, and told who died; a rank that came that far before it died has voted."""
        for seat in seats[:2]:
            seat.vote(1, Ballot.STAGED)

        def meet(seat: Rendezvous) -> str:
            if seat.rank == 0:
                with pytest.raises(PeerLostError) as told:
                    seat.await_votes(1, Ballot.STAGED, soon())
                return str(told.value)
            if seat.rank == 1:
                seat.mark_lost(2)
            return ""

        assert "ranks [2] died before they reached STAGED" in together(seats, meet)[0]
        seats[2].vote(1, Ballot.STAGED)
        assert len(seats[0].await_votes(1, Ballot.STAGED, at_once())) == 3

    def test_who_has_finished_is_settled_by_the_living(self, seats: Sequence[Rendezvous]) -> None:
        seats[0].mark_lost(2)
        seats[0].vote(1, Ballot.FINISHED)
        with pytest.raises(DeadlineExceededError, match=r"no vote FINISHED .*ranks \[1, 2\] missing"):
            seats[0].await_votes(1, Ballot.FINISHED, at_once())
        seats[1].vote(1, Ballot.FINISHED)
        with pytest.raises(PeerLostError, match=r"ranks \[2\] died"):
            seats[0].await_votes(1, Ballot.FINISHED, at_once())

    def test_who_is_excused_is_not_waited_for(self, seats: Sequence[Rendezvous]) -> None:
        seats[0].mark_lost(2)
        for ballot in (Ballot.STAGED, Ballot.VERIFIED, Ballot.FINISHED):
            for seat in seats[:2]:
                seat.vote(1, ballot)
            assert len(seats[0].await_votes(1, ballot, at_once(), excused=frozenset({2}))) == 3

    def test_a_death_decides_no_where_nothing_is_decided(self, seats: Sequence[Rendezvous]) -> None:
        """So that who waits for the decision undoes at once; a YES that stands is followed."""
        seats[0].announce(command(1))
        seats[0].decide_once(Question.INSTALL, 1, Decision.YES)
        seats[1].mark_lost(2)
        assert seats[0].decide_once(Question.COMMIT, 1, Decision.YES) is Decision.NO
        assert [seat.decided(Question.INSTALL, 1) for seat in seats] == [Decision.YES] * 3

    def test_a_death_between_two_commands_takes_nothing_from_the_next(self, seats: Sequence[Rendezvous]) -> None:
        seats[0].mark_lost(2)
        seats[2].mark_back()
        seats[0].announce(command(1))
        assert seats[1].decide_once(Question.INSTALL, 1, Decision.YES) is Decision.YES

    # --- decisions ---------------------------------------------------------------------------------

    @pytest.mark.parametrize("question", QUESTIONS)
    def test_a_question_is_open_until_somebody_proposes(self, seats: Sequence[Rendezvous], question: Question) -> None:
        seats[0].announce(command(1))
        assert [seat.decided(question, 1) for seat in seats] == [Decision.OPEN] * 3

    @pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
    @pytest.mark.parametrize("proposals", list(itertools.product((Decision.YES, Decision.NO), repeat=3)))
    def test_the_first_proposal_is_the_decision_of_all(
        self, seats: Sequence[Rendezvous], order: tuple[int, ...], proposals: tuple[Decision, ...]
    ) -> None:
        seats[0].announce(command(1))
        answers = [seats[rank].decide_once(Question.COMMIT, 1, proposals[rank]) for rank in order]
        assert answers == [proposals[order[0]]] * 3
        assert [seat.decided(Question.COMMIT, 1) for seat in seats] == answers
        assert seats[0].decided(Question.INSTALL, 1) is Decision.OPEN

    def test_racing_proposals_end_in_one_decision(self, seats: Sequence[Rendezvous]) -> None:
        for number in range(1, 51):
            seats[0].announce(command(number))
            proposals = (Decision.YES, Decision.NO, Decision.YES if number % 2 else Decision.NO)
            answers = together(
                seats, lambda seat, n=number, p=proposals: seat.decide_once(Question.INSTALL, n, p[seat.rank])
            )
            assert len(set(answers)) == 1
            assert answers[0] is not Decision.OPEN

    def test_a_rank_that_waits_is_woken_by_the_decision(self, seats: Sequence[Rendezvous]) -> None:
        seats[0].announce(command(1))

        def decide(seat: Rendezvous) -> Decision:
            if seat.rank == 0:
                return seat.decide_once(Question.INSTALL, 1, Decision.YES)
            return seat.await_decision(Question.INSTALL, 1, soon())

        assert together(seats, decide) == [Decision.YES] * 3

    def test_whose_deadline_passes_decides_no_for_all(self, seats: Sequence[Rendezvous]) -> None:
        seats[0].announce(command(1))
        assert seats[1].await_decision(Question.COMMIT, 1, in_s(0.01)) is Decision.NO
        assert seats[0].decide_once(Question.COMMIT, 1, Decision.YES) is Decision.NO
        assert seats[2].await_decision(Question.COMMIT, 1, soon()) is Decision.NO

    def test_a_decision_that_is_there_counts_even_after_the_deadline(self, seats: Sequence[Rendezvous]) -> None:
        seats[0].announce(command(1))
        seats[0].decide_once(Question.COMMIT, 1, Decision.YES)
        assert seats[1].await_decision(Question.COMMIT, 1, at_once()) is Decision.YES

    @pytest.mark.parametrize("question", QUESTIONS)
    def test_a_question_of_an_older_command_is_refused(self, seats: Sequence[Rendezvous], question: Question) -> None:
        seats[0].announce(command(1))
        seats[0].decide_once(question, 1, Decision.YES)
        seats[0].announce(command(2))
        for ask in (
            lambda: seats[1].decide_once(question, 1, Decision.NO),
            lambda: seats[1].decided(question, 1),
            lambda: seats[1].await_decision(question, 1, soon()),
        ):
            with pytest.raises(LifecycleError, match="command 2 already"):
                ask()
        assert seats[1].decided(question, 2) is Decision.OPEN
