"""What every kind of tensor-parallel collectives must do: inherit `CollectivesSuite`, give it one fixture."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import numpy as np
import pytest

from fastdeploy_rl.collectives.base import Collectives
from fastdeploy_rl.errors import DeadlineExceededError, FastDeployRLError

_T = TypeVar("_T")
LONG_S = 60.0
"""Only a hanging test reaches it."""
SHORT_S = 0.2


class MakeRanks(Protocol):
    """Makes one group and gives every rank's place in it, in rank order; closes them after the test."""

    def __call__(self, num_ranks: int, *, timeout_s: float = LONG_S) -> Sequence[Collectives]: ...


def together(ranks: Sequence[Collectives], act: Callable[[Collectives], _T]) -> list[_T]:
    """Every rank acts at the same time; results in rank order, the first error raised."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(act, ranks))


def failures(ranks: Sequence[Collectives], act: Callable[[Collectives], object]) -> list[str]:
    """What each rank's DeadlineExceededError says."""

    def attempt(rank: Collectives) -> str:
        with pytest.raises(DeadlineExceededError) as caught:
            act(rank)
        return str(caught.value)

    return together(ranks, attempt)


def own_values(rank: int, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, rank]).standard_normal(shape).astype(np.float32)


def summed(num_ranks: int, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """In rank order, as everybody must sum."""
    total = own_values(0, shape, seed)
    for rank in range(1, num_ranks):
        total = total + own_values(rank, shape, seed)
    return total


def all_reduced(rank: Collectives, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    values = own_values(rank.rank, shape, seed)
    rank.all_reduce(values)
    return values


class CollectivesSuite:
    """Fixture to provide: `make_ranks`."""

    @pytest.mark.parametrize("num_ranks", [1, 2, 3])
    @pytest.mark.parametrize("shape", [(0,), (1,), (7, 3), (40_000,)])
    def test_sums_are_those_in_rank_order_on_every_rank(
        self, make_ranks: MakeRanks, num_ranks: int, shape: tuple[int, ...]
    ) -> None:
        sums = together(make_ranks(num_ranks), lambda rank: all_reduced(rank, shape))
        assert [values.tobytes() for values in sums] == [summed(num_ranks, shape).tobytes()] * num_ranks

    def test_sums_of_infinities_and_nan_are_what_ieee_says(self, make_ranks: MakeRanks) -> None:
        def act(rank: Collectives) -> list[float]:
            values = np.array(
                [np.inf, -np.inf if rank.rank else np.inf, np.nan if rank.rank else 1.0, -0.0], np.float32
            )
            rank.all_reduce(values)
            return values.tolist()

        for values in together(make_ranks(2), act):
            assert values[0] == np.inf
            assert np.isnan(values[1:3]).all()
            assert np.signbit(values[3])

    @pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint8, np.bool_])
    @pytest.mark.parametrize("shape", [(), (0, 2), (3, 5), (20_000,)])
    def test_gathering_keeps_order_shape_and_type(
        self, make_ranks: MakeRanks, dtype: Any, shape: tuple[int, ...]
    ) -> None:
        def own(rank: int) -> np.ndarray:
            return np.random.default_rng(rank).integers(0, 2, shape).astype(dtype)

        for gathered in together(make_ranks(3), lambda rank: rank.all_gather(own(rank.rank))):
            assert (gathered.dtype, gathered.shape) == (dtype, (3, *shape))
            assert all(np.array_equal(gathered[rank], own(rank)) for rank in range(3))

    def test_gathering_takes_arrays_with_gaps_and_gives_fresh_ones(self, make_ranks: MakeRanks) -> None:
        def act(rank: Collectives) -> bool:
            own = np.arange(12, dtype=np.int64).reshape(3, 4)[:, ::2] + 100 * rank.rank
            kept = own.copy()
            gathered = rank.all_gather(own)
            gathered[:] = -1
            return bool(np.array_equal(own, kept))

        assert together(make_ranks(2), act) == [True, True]

    @pytest.mark.parametrize("root", [0, 1, 2])
    def test_every_rank_gets_the_payload_of_the_root(self, make_ranks: MakeRanks, root: int) -> None:
        payloads = [bytes([root + 1]) * size for size in (0, 1, 4000, 5000, 300_000)]

        def act(rank: Collectives) -> list[bytes]:
            return [
                rank.broadcast_bytes(payload if rank.rank == root else None, root, timeout_s=LONG_S)
                for payload in payloads
            ]

        assert together(make_ranks(3), act) == [payloads] * 3

    def test_many_calls_of_all_kinds_never_mix(self, make_ranks: MakeRanks) -> None:
        def act(rank: Collectives) -> list[int]:
            wrong = []
            for step in range(200):
                told = rank.broadcast_bytes(
                    str(step).encode() if rank.rank == step % 3 else None, step % 3, timeout_s=60
                )
                gathered = rank.all_gather(np.array([rank.rank, step]))
                sums = all_reduced(rank, (5,), step)
                rank.barrier()
                is_right = (
                    told == str(step).encode()
                    and gathered.tolist() == [[other, step] for other in range(3)]
                    and sums.tobytes() == summed(3, (5,), step).tobytes()
                )
                wrong += [] if is_right else [step]
            return wrong

        assert together(make_ranks(3), act) == [[], [], []]

    def test_a_barrier_holds_the_first_until_the_last_has_come(self, make_ranks: MakeRanks) -> None:
        ranks = make_ranks(3)
        came: list[int] = []

        def act(rank: Collectives) -> int:
            came.append(rank.rank)
            rank.barrier()
            return len(came)

        assert together(ranks, act) == [3, 3, 3]

    @pytest.mark.parametrize(
        "call",
        [
            lambda rank: rank.all_reduce(np.zeros(3, np.float32)),
            lambda rank: rank.all_gather(np.zeros(3)),
            lambda rank: rank.broadcast_bytes(b"x" if rank.rank == 0 else None, 0, timeout_s=SHORT_S),
            lambda rank: rank.barrier(),
        ],
        ids=["all_reduce", "all_gather", "broadcast_bytes", "barrier"],
    )
    def test_a_rank_that_does_not_come_is_named_on_every_rank_that_did(
        self, make_ranks: MakeRanks, call: Callable[[Collectives], object]
    ) -> None:
        """And the group is of no use afterwards, to nobody: not to the late one either."""
        ranks = make_ranks(3, timeout_s=SHORT_S)
        assert all("ranks [1] missing" in text for text in failures([ranks[0], ranks[2]], call))
        assert len(failures(ranks, lambda rank: rank.barrier())) == 3

    def test_sums_that_were_missed_leave_the_values_alone(self, make_ranks: MakeRanks) -> None:
        first, _ = make_ranks(2, timeout_s=0.01)
        values = np.arange(5, dtype=np.float32)
        with pytest.raises(DeadlineExceededError):
            first.all_reduce(values)
        assert values.tolist() == [0, 1, 2, 3, 4]

    def test_what_is_not_float32_is_refused_and_nobody_is_kept_waiting(self, make_ranks: MakeRanks) -> None:
        def act(rank: Collectives) -> bytes:
            with pytest.raises(FastDeployRLError, match="float64"):
                rank.all_reduce(np.zeros(3))
            return all_reduced(rank, (3,)).tobytes()

        assert together(make_ranks(2), act) == [summed(2, (3,)).tobytes()] * 2

    def test_a_root_without_a_payload_is_refused_before_anybody_is_met(self, make_ranks: MakeRanks) -> None:
        ranks = make_ranks(2)
        with pytest.raises(FastDeployRLError, match="payload"):
            ranks[0].broadcast_bytes(None, 0, timeout_s=LONG_S)
        together(ranks, lambda rank: rank.barrier())

    def test_closing_twice_is_harmless_and_the_closed_one_refuses(self, make_ranks: MakeRanks) -> None:
        ranks = make_ranks(2)
        together(ranks, lambda rank: rank.barrier())
        for rank in ranks:
            rank.close()
            rank.close()
            with pytest.raises(FastDeployRLError, match="closed"):
                rank.barrier()
