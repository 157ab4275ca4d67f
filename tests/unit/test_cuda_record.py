"""Records of device memory as they come from another process."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_rl.errors import ManifestError
from fastdeploy_rl.memory.cuda_record import MAX_RECORD_BYTES, CudaRecord, this_process
from fastdeploy_rl.memory.export_table import NUM_ROWS

RECORD = CudaRecord(
    device="GPU-11111111-aaaa-4aaa-8aaa-000000000001",
    exporter="0123456789abcdef",
    process="4026531836:12:345",
    row=3,
    nonce=7,
    handle=bytes(range(64)),
    base_address=1 << 40,
    base_bytes=2 << 20,
    offset=1024,
    num_bytes=24,
)

counts = st.integers(0, 2**61)


@given(offset=counts, num_bytes=counts, handle=st.binary(min_size=64, max_size=64), row=st.integers(0, NUM_ROWS - 1))
def test_a_record_comes_back_as_it_was(offset: int, num_bytes: int, handle: bytes, row: int) -> None:
    changes = {"offset": offset, "num_bytes": num_bytes, "handle": handle, "row": row}
    changes["base_bytes"] = max(offset + num_bytes, 1)
    record = msgspec.structs.replace(RECORD, **changes)
    assert CudaRecord.from_json(record.to_json()) == record


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("exporter", "../../../etc/passw"),
        ("exporter", "0123456789ABCDEF"),
        ("exporter", "0123456789abcdef\n"),
        ("row", -1),
        ("row", NUM_ROWS),
        ("nonce", 0),
        ("handle", "AAAA"),
        ("offset", -1),
        ("offset", 2 << 20),
        ("num_bytes", 2 << 20),
        ("num_bytes", 2**63),
        ("base_bytes", "many"),
        ("base_bytes", 0),
        ("base_address", 0),
        ("format", 2),
        ("device", "G" * 65),
        ("surplus", 1),
    ],
)
def test_a_record_with_a_wrong_field_is_refused(field: str, value: object) -> None:
    fields = msgspec.json.decode(RECORD.to_json()) | {field: value}
    with pytest.raises(ManifestError, match="malformed record of device memory"):
        CudaRecord.from_json(msgspec.json.encode(fields))


@pytest.mark.parametrize("field", ["device", "exporter", "nonce", "handle", "offset"])
def test_a_record_without_a_field_is_refused(field: str) -> None:
    fields = msgspec.json.decode(RECORD.to_json())
    del fields[field]
    with pytest.raises(ManifestError, match=field):
        CudaRecord.from_json(msgspec.json.encode(fields))


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\x80\x04", b"[" * 4000, b"null"])
def test_what_is_no_record_is_refused(data: bytes) -> None:
    with pytest.raises(ManifestError, match="malformed"):
        CudaRecord.from_json(data)


def test_a_record_that_is_too_long_is_not_even_parsed() -> None:
    with pytest.raises(ManifestError, match=f"at most {MAX_RECORD_BYTES} bytes"):
        CudaRecord.from_json(RECORD.to_json().ljust(MAX_RECORD_BYTES + 1))


def test_a_process_is_itself_each_time_it_looks() -> None:
    assert this_process() == this_process()
