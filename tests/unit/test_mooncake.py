"""What stands before Mooncake's library: settings that cannot work, packages that are missing, codes, ranges."""

import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_rl.errors import (
    ConfigurationError,
    FastDeployRLError,
    NoSpaceError,
    PeerLostError,
    SegmentError,
)
from fastdeploy_rl.plan.byte_range import ByteRange
from fastdeploy_rl.testing.fake_mooncake import FakeMooncake, FakeTransferEngine, fake_hcas
from fastdeploy_rl.transport.mooncake import MooncakeTransport, Row, calls_of
from fastdeploy_rl.transport.mooncake_engine import (
    MAX_SLICES,
    MooncakeEngine,
    MooncakeSettings,
    Slice,
    load_library,
    patience_s,
)
from fastdeploy_rl.transport.mooncake_exporter import MooncakeExporter

ADDRESS = 0x7000_0000_0000


@pytest.fixture
def infiniband_dir(tmp_path: Path) -> Path:
    return fake_hcas(tmp_path)


# --- what cannot work


@pytest.mark.parametrize("side", ["engine", "trainer"])
def test_rdma_without_an_hca_is_refused_before_anything_is_started(side: str, tmp_path: Path) -> None:
    fake = FakeMooncake()
    settings = MooncakeSettings("rdma", infiniband_dir=tmp_path / "none")
    opens = {
        "engine": partial(MooncakeTransport.open, "host:1", settings, library=fake),
        "trainer": partial(MooncakeExporter.open, settings, library=fake),
    }
    with pytest.raises(ConfigurationError, match=r"protocol rdma, and no HCA here: nothing in .*none.* fall back"):
        opens[side]()
    assert (fake.initialized, fake.live) == ([], [])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (MooncakeSettings("rdma", "mlx5_7"), r"'mlx5_7', which is not here; HCAs of this machine: mlx5_0, mlx5_1"),
        (MooncakeSettings("rdma", "mlx5_0,nosuch"), r"'nosuch', which is not here"),
        (MooncakeSettings("rdma", "mlx5_1"), r"no port of mlx5_1 is active"),
        (MooncakeSettings("ib"), r"protocol must be tcp or rdma, got 'ib'"),
        (MooncakeSettings("tcp", "mlx5_0"), r"device_name 'mlx5_0' is for protocol rdma only"),
        (MooncakeSettings(local_hostname=""), r"local_hostname is empty"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(
    settings: MooncakeSettings, message: str, infiniband_dir: Path
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        MooncakeSettings(settings.protocol, settings.device_name, settings.local_hostname, infiniband_dir).check()


@pytest.mark.parametrize("device_name", ["", "mlx5_0", "mlx5_0,mlx5_1"])
def test_rdma_with_an_active_hca_is_taken(device_name: str, infiniband_dir: Path) -> None:
    MooncakeSettings("rdma", device_name, infiniband_dir=infiniband_dir).check()


def test_a_variable_that_would_force_tcp_makes_rdma_fail(infiniband_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    with pytest.raises(ConfigurationError, match="MC_FORCE_TCP is set"):
        MooncakeSettings("rdma", infiniband_dir=infiniband_dir).check()
    MooncakeSettings("tcp", infiniband_dir=infiniband_dir).check()


# --- what is missing


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where Python looks for packages first. What it had loaded of mooncake, it has again afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    loaded = forget_mooncake()
    yield tmp_path
    forget_mooncake()
    sys.modules.update(loaded)


def forget_mooncake() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] == "mooncake"]
    return {name: sys.modules.pop(name) for name in names}


def make_package(directory: Path, engine: str | None) -> None:
    """Called mooncake; `engine`: what its module of that name does, None: there is none."""
    (directory / "mooncake").mkdir()
    (directory / "mooncake/__init__.py").touch()
    if engine is not None:
        (directory / "mooncake/engine.py").write_text(engine)


@pytest.mark.parametrize(
    ("library", "message"),
    [
        ("libibverbs.so.1", r"needs libibverbs\.so\.1 of the package libibverbs1 .*apt-get install libibverbs1"),
        ("libmlx5.so.1", r"package ibverbs-providers"),
        ("libcudart.so.12", r"built for CUDA and finds no libcudart\.so\.12.*mooncake-transfer-engine-non-cuda"),
        ("libother.so.3", r"cannot be loaded: libother\.so\.3: cannot open shared object file"),
    ],
)
def test_a_missing_library_of_the_system_is_named_with_its_package(library: str, message: str, elsewhere: Path) -> None:
    text = f"{library}: cannot open shared object file: No such file or directory"
    make_package(elsewhere, f"raise ImportError({text!r})")
    with pytest.raises(ConfigurationError, match=message):
        load_library()


def test_a_missing_package_is_named(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    with pytest.raises(ConfigurationError, match=r"needs the package mooncake-transfer-engine-non-cuda: pip install"):
        load_library()


def test_another_package_of_that_name_is_not_taken_for_it(elsewhere: Path) -> None:
    make_package(elsewhere, None)
    with pytest.raises(ConfigurationError, match=r"needs the package mooncake-transfer-engine-non-cuda: pip install"):
        load_library()


def test_a_package_that_is_broken_by_what_it_imports_is_no_missing_package(elsewhere: Path) -> None:
    make_package(elsewhere, "import no_such_module_at_all")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        load_library()


# --- how the library is opened, and what it answers


class Witness(FakeMooncake):
    """Notes the variables that an engine finds when it is opened."""

    def __call__(self) -> FakeTransferEngine:
        self.found = {name: value for name, value in os.environ.items() if name.startswith("MC_")}
        return super().__call__()


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """And none is left afterwards."""
    for name in ("MC_FORCE_TCP", "MC_FORCE_HCA", "MC_LOG_LEVEL", "MC_TRANSFER_TIMEOUT", "MC_TCP_PROGRESS_TIMEOUT_SEC"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_variables")
@pytest.mark.parametrize(("protocol", "forced"), [("tcp", "MC_FORCE_TCP"), ("rdma", "MC_FORCE_HCA")])
def test_the_library_is_made_to_take_the_protocol_that_was_asked_for(protocol: str, forced: str) -> None:
    """It would take RDMA over TCP where there is an HCA, and TCP over RDMA where there is none."""
    witness = Witness()
    engine = MooncakeEngine.open(MooncakeSettings(protocol, local_hostname="10.0.0.7"), witness, patience_s=16)
    assert witness.initialized == [("10.0.0.7", "P2PHANDSHAKE", protocol, "")]
    assert witness.found == {
        forced: "1",
        "MC_TRANSFER_TIMEOUT": "16",
        "MC_LOG_LEVEL": "ERROR",
    }
    assert {forced, "MC_TRANSFER_TIMEOUT"}.isdisjoint(os.environ)
    assert engine.session.startswith("10.0.0.7:")
    engine.close()


@pytest.mark.usefixtures("no_variables")
def test_who_set_a_log_level_or_forced_hcas_finds_it_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_LOG_LEVEL", "INFO")
    monkeypatch.setenv("MC_FORCE_HCA", "yes")
    witness = Witness()
    MooncakeEngine.open(MooncakeSettings(), witness, patience_s=512).close()
    assert (witness.found["MC_LOG_LEVEL"], os.environ["MC_FORCE_HCA"]) == ("INFO", "yes")
    assert "MC_FORCE_HCA" not in witness.found
    assert witness.found["MC_TRANSFER_TIMEOUT"] == "512"


@pytest.mark.usefixtures("no_variables")
@pytest.mark.parametrize(("seconds", "limit"), [(-1, "1"), (0.2, "1"), (4.2, "5"), (600, "30")])
def test_a_read_that_stands_still_ends_about_when_its_time_is_over(seconds: float, limit: str) -> None:
    engine = MooncakeEngine.open(MooncakeSettings(), FakeMooncake(), patience_s=8)
    engine.limit_stalls(seconds)
    assert os.environ["MC_TCP_PROGRESS_TIMEOUT_SEC"] == limit
    engine.close()


def test_tcp_that_is_open_to_all_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    MooncakeEngine.open(MooncakeSettings(), FakeMooncake(), patience_s=8).close()
    assert "listens on every interface, without authentication" in caplog.text


@pytest.mark.parametrize(("seconds", "expected"), [(-3, 8), (0.1, 8), (7.9, 8), (8, 16), (29.99, 32), (600, 1024)])
def test_patience_is_a_power_of_two_of_at_least_the_time_that_is_left(seconds: float, expected: int) -> None:
    assert patience_s(seconds) == expected


@pytest.mark.parametrize(
    ("code", "error"),
    [(-1, PeerLostError), (-202, ConfigurationError), (-302, NoSpaceError), (-7, SegmentError), (-99, PeerLostError)],
)
def test_a_return_code_becomes_an_error_that_tells_it(code: int, error: type[FastDeployRLError]) -> None:
    with pytest.raises(error, match=rf"initialize for tcp on 127\.0\.0\.1: return code {code} \("):
        MooncakeEngine.open(MooncakeSettings(), FakeMooncake(initialize_code=code), patience_s=8)
    engine = MooncakeEngine.open(MooncakeSettings(), FakeMooncake(register_code=code), patience_s=8)
    with pytest.raises(error, match=rf"register_memory of 64 bytes at 0x[0-9a-f]+: return code {code} \("):
        engine.register(ADDRESS, 64)
    engine.close()


def test_a_read_that_fails_tells_how_much_of_whom() -> None:
    fake = FakeMooncake()
    engine = MooncakeEngine.open(MooncakeSettings(), fake, patience_s=8)
    with pytest.raises(PeerLostError, match=r"read of 3 bytes in 2 slices from host:9: return code -1"):
        engine.read("host:9", [Slice(ADDRESS, ADDRESS, 1), Slice(ADDRESS, ADDRESS, 2)])
    engine.close()
    engine.close()
    assert fake.live == []
    with pytest.raises(SegmentError, match="closed"):
        engine.register(ADDRESS, 64)


def test_closing_unregisters_what_is_registered() -> None:
    fake = FakeMooncake()
    engine = MooncakeEngine.open(MooncakeSettings(), fake, patience_s=8)
    engine.register(ADDRESS, 64)
    memory = fake.memories[engine.session]
    engine.close()
    assert memory.registered == {}


# --- ranges as calls


@st.composite
def byte_ranges(draw: st.DrawFn) -> ByteRange:
    row_bytes = draw(st.integers(0, 40))
    rows = draw(st.integers(0, 3000 // max(1, row_bytes)))
    return ByteRange(
        draw(st.integers(0, 2)), draw(st.integers(0, 99)), draw(st.integers(row_bytes, 64)), rows, row_bytes, 0
    )


def placed(ranges: Sequence[ByteRange]) -> list[ByteRange]:
    found, at = [], 0
    for each in ranges:
        found.append(each._replace(target_offset=at))
        at += each.num_bytes
    return found


@given(st.lists(byte_ranges(), max_size=8).map(placed), st.integers(1, 700))
def test_calls_have_each_byte_once_and_tell_when_a_range_is_complete(
    ranges: list[ByteRange], bucket_bytes: int
) -> None:
    calls = list(calls_of(ranges, bucket_bytes))
    rows = [row for call in calls for row in call]
    assert [place for row in rows for place in places(row)] == [place for each in ranges for place in wanted(each)]
    assert [row.number for row in rows if row.is_last] == list(range(len(ranges)))
    assert all(
        not row.is_last or not any(later.number == row.number for later in rows[i + 1 :]) for i, row in enumerate(rows)
    )
    assert all(
        call and len(call) <= MAX_SLICES and sum(row.num_bytes for row in call) <= bucket_bytes for call in calls
    )


def test_a_large_bucket_is_no_large_call() -> None:
    calls = list(calls_of([ByteRange(0, 0, 0, 1, 1 << 30, 0)], 1 << 30))
    assert {sum(row.num_bytes for row in call) for call in calls} == {64 << 20}
    assert len(calls) == 16


def places(row: Row) -> list[tuple[int, int, int]]:
    """Segment, offset and place in the target of each byte."""
    return [(row.segment, row.offset + i, row.target_offset + i) for i in range(row.num_bytes)]


def wanted(each: ByteRange) -> list[tuple[int, int, int]]:
    return [
        (each.segment, each.offset + row * each.stride + i, each.target_offset + row * each.row_bytes + i)
        for row in range(each.rows)
        for i in range(each.row_bytes)
    ]
