"""The law of receipts: what is proved follows from the sums of what was read, and from nothing else."""

import pytest
from msgspec import structs

from fastdeploy_rl.checksum import Fletcher4, of_bytes
from fastdeploy_rl.errors import ChecksumMismatchError
from fastdeploy_rl.manifest import Manifest, Part, Segment, Tensor, build_manifest
from fastdeploy_rl.receipt import RankReceipt, check_reads, differing, merge, with_live

BYTES = {"a": bytes(range(16)), "b": bytes(range(7, 31))}


def halves(data: bytes) -> tuple[Fletcher4, Fletcher4]:
    """What each of two ranks counts that read one half."""
    half = len(data) // 2
    return of_bytes(data[:half] + bytes(half)), of_bytes(bytes(half) + data[half:])


def manifest() -> Manifest:
    tensors = [
        Tensor(name, "U8", (len(data),), None, (Part(0, 512 * place, 0, 0),), of_bytes(data).hex())
        for place, (name, data) in enumerate(BYTES.items())
    ]
    return build_manifest("1.2", "full", [Segment("shm", "arena", 4096, 0, 2)], tensors, {})


def parts(version: str = "1.2") -> list[RankReceipt]:
    """Two ranks, each of which read one half of each tensor."""
    return [
        RankReceipt(
            rank, version, {name: halves(data)[rank].hex() for name, data in BYTES.items()}, {"a": f"{rank:064x}"}
        )
        for rank in range(2)
    ]


def with_other_read(name: str) -> list[RankReceipt]:
    first, second = parts()
    changed = Fletcher4.parse(second.read[name])._replace(d=5).hex()
    return [first, structs.replace(second, read=second.read | {name: changed})]


def test_the_content_digest_follows_from_what_all_ranks_read_together() -> None:
    published = manifest()
    receipt = merge(parts(), source="ipc", layout_digest=published.layout_digest)
    assert receipt.content_digest == published.content_digest
    assert receipt.read == {tensor.name: tensor.checksum for tensor in published.tensors}
    check_reads(receipt, receipt.read)


@pytest.mark.parametrize("name", BYTES)
def test_another_sum_of_one_rank_is_another_digest_and_is_named(name: str) -> None:
    published = manifest()
    receipt = merge(with_other_read(name), source="ipc", layout_digest=published.layout_digest)
    assert receipt.content_digest != published.content_digest
    with pytest.raises(ChecksumMismatchError, match=f"differ from what was published: {name}; publish again"):
        check_reads(receipt, {tensor.name: tensor.checksum for tensor in published.tensors})


def test_a_tensor_that_nobody_read_is_named() -> None:
    with pytest.raises(ChecksumMismatchError, match="published: c;"):
        check_reads(merge(parts(), source="ipc", layout_digest="0" * 64), {"c": "0" * 64})


def test_ranks_of_two_versions_have_no_receipt() -> None:
    mixed = [parts("1.2")[0], parts("1.3")[1]]
    with pytest.raises(ChecksumMismatchError, match=r"different versions: \['1.2', '1.3'\]"):
        merge(mixed, source="ipc", layout_digest="0" * 64)
    with pytest.raises(ChecksumMismatchError, match=r"hold \['1.3'\] beside 1.2"):
        with_live(merge(parts(), source="ipc", layout_digest="0" * 64), mixed)


def test_a_live_sum_that_is_another_one_is_told_with_its_rank() -> None:
    receipt = merge(parts(), source="ipc", layout_digest="0" * 64)
    assert differing(receipt, parts()) == []
    changed = structs.replace(parts()[1], live={"a": "f" * 64})
    assert differing(receipt, [parts()[0], changed]) == [("a", 1)]
