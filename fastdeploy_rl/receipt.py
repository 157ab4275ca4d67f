"""The law of receipts: what proves, after a commit, which bytes each rank read and which are live.

Per tensor and rank two checksums: `read`, the contribution of the source bytes that this rank consumed and counts
(zero where another rank counts them), and `live`, the checksum of the parameter as it is bound. Summed over ranks the
reads must give the manifest's checksum; a receipt's content digest is computed from these sums, never copied. Knows
nothing of memory, ranks' processes or boards."""

import functools
from collections.abc import Collection

import msgspec
from msgspec import structs

from fastdeploy_rl.checksum import ZERO, Fletcher4, add
from fastdeploy_rl.errors import ChecksumMismatchError
from fastdeploy_rl.manifest import content_digest_of


class RankReceipt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's half: `read` by manifest tensor, `live` by engine parameter; values are 64 hex digits."""

    rank: int
    version: str
    read: dict[str, str]
    live: dict[str, str]


class Receipt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole engine's proof. `live[parameter][rank]` and `read[tensor]` (summed over ranks) are 64 hex digits.

    `source` says where the bytes came from ("checkpoint" for a cold start, else the load strategy)."""

    version: str
    source: str
    content_digest: str
    read: dict[str, str]
    live: dict[str, list[str]]

    def __str__(self) -> str:
        """One line, without the checksum of each tensor."""
        return f"version {self.version} from {self.source}: {len(self.read)} tensors, content {self.content_digest}"


def sum_reads(parts: list[RankReceipt]) -> dict[str, Fletcher4]:
    """Tensor by tensor, the ranks' contributions added up (they are linear)."""
    names = {name: None for part in parts for name in part.read}
    return {
        name: functools.reduce(add, (Fletcher4.parse(part.read[name]) for part in parts if name in part.read), ZERO)
        for name in names
    }


def merge(parts: list[RankReceipt], *, source: str, layout_digest: str) -> Receipt:
    """One receipt of all ranks' parts, in rank order. ChecksumMismatchError where ranks speak of different versions."""
    versions = {part.version for part in parts}
    if len(versions) != 1:
        raise ChecksumMismatchError(f"ranks hold different versions: {sorted(versions)}; update the engine again")
    sums = sum_reads(parts)
    return Receipt(
        version=parts[0].version,
        source=source,
        content_digest=content_digest_of(layout_digest, sums),
        read={name: value.hex() for name, value in sums.items()},
        live=_live(parts),
    )


def check_replicas(parts: list[RankReceipt], replicated: Collection[str]) -> None:
    """ChecksumMismatchError unless every rank has the same of these parameters, of which each has all: one rank's read
    stands for them."""
    first = parts[0].live
    wrong = [
        f"{name} on rank {part.rank}"
        for part in parts[1:]
        for name in sorted(replicated)
        if part.live.get(name) != first.get(name)
    ]
    if wrong:
        raise ChecksumMismatchError(
            f"version {parts[0].version}: ranks read other bytes than rank 0 of what each of them holds whole: "
            f"{', '.join(wrong[:20])}{f' and {len(wrong) - 20} more' if len(wrong) > 20 else ''}; publish again"
        )


def with_live(receipt: Receipt, parts: list[RankReceipt]) -> Receipt:
    """The same proof of what was read, with what is live after the
    install. ChecksumMismatchError where a rank holds another version."""
    others = {part.version for part in parts} - {receipt.version}
    if others:
        raise ChecksumMismatchError(f"ranks hold {sorted(others)} beside {receipt.version}; update the engine again")
    return structs.replace(receipt, live=_live(parts))


def _live(parts: list[RankReceipt]) -> dict[str, list[str]]:
    return {name: [part.live[name] for part in parts] for name in parts[0].live}


def check_reads(receipt: Receipt, published: dict[str, str]) -> None:
    """ChecksumMismatchError that names every tensor whose summed reads are not the published checksum."""
    wrong = [name for name, checksum in published.items() if receipt.read.get(name) != checksum]
    if wrong:
        raise ChecksumMismatchError(
            f"version {receipt.version}: the bytes read differ from what was published: {', '.join(wrong[:20])}"
            f"{f' and {len(wrong) - 20} more' if len(wrong) > 20 else ''}; publish again"
        )


def differing(receipt: Receipt, recomputed: list[RankReceipt]) -> list[tuple[str, int]]:
    """(parameter, rank) of every live checksum that is no longer what the receipt says."""
    return [
        (name, part.rank)
        for name, by_rank in receipt.live.items()
        for part in recomputed
        if part.live.get(name) != by_rank[part.rank]
    ]
