"""Devices by index, GPU- and MIG- identifier, and the reasons where there are none."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_rl.errors import ConfigurationError, CudaUnavailableError
from fastdeploy_rl.memory.cuda_devices import (
    CudaDevice,
    explain_selection,
    find_device,
    open_driver,
    parse_selector,
    visible_devices,
)
from fastdeploy_rl.testing.fake_cuda import DEVICES, FakeCuda, FakeDevice

GPU = CudaDevice(0, "GPU-11111111-aaaa-4aaa-8aaa-000000000001", "Fake A100")
TWIN = CudaDevice(1, "GPU-11111111-bbbb-4bbb-8bbb-000000000002", "Fake A100")
MIG = CudaDevice(2, "MIG-33333333-dddd-4ddd-8ddd-000000000004", "Fake A100 MIG 1g.5gb")
ALL = [GPU, TWIN, MIG]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with FakeCuda() as cuda:
        for name, value in cuda.environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        yield cuda


# --- names


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("0", GPU),
        ("2", MIG),
        (GPU.uuid, GPU),
        (GPU.uuid.upper(), GPU),
        ("GPU-11111111-b", TWIN),
        ("gpu-11111111-A", GPU),
        ("MIG-3", MIG),
        (MIG.uuid, MIG),
    ],
)
def test_a_device_is_found_by_index_or_identifier(text: str, device: CudaDevice) -> None:
    assert find_device(text, ALL) == device


@pytest.mark.parametrize("text", ["GPU-1111", "GPU-11111111-"])
def test_a_name_that_several_devices_have_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="several CUDA devices are called") as refused:
        find_device(text, ALL)
    assert GPU.uuid in str(refused.value)


@pytest.mark.parametrize("text", ["3", "GPU-3333", "MIG-1111", "GPU-44444444-aaaa-4aaa-8aaa-000000000001"])
def test_a_name_that_no_device_has_is_refused_with_those_there_are(text: str) -> None:
    with pytest.raises(ConfigurationError, match="no CUDA device is called") as refused:
        find_device(text, ALL)
    assert all(device.uuid in str(refused.value) for device in ALL)


@pytest.mark.parametrize("text", ["", "-1", " 0", "0 ", "00000", "cuda:0", "GPU-", "GPU-xyz", "0,1", "٣", "GPU-1\n"])
def test_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="no CUDA device is called"):
        parse_selector(text)


def test_the_old_form_of_a_mig_name_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigurationError, match="nvidia-smi -L"):
        parse_selector(f"MIG-{GPU.uuid}/1/0")


@given(st.text(max_size=60))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        selector = parse_selector(text)
    except ConfigurationError:
        return
    assert (selector.ordinal is None) == bool(selector.prefix)


# --- what the driver lists


def test_the_devices_of_the_driver_are_listed_with_their_uuids(cuda: FakeCuda) -> None:
    assert visible_devices() == ALL
    assert [device.uuid for device in ALL] == [device.uuid for device in DEVICES]


def test_listing_devices_makes_no_memory(cuda: FakeCuda) -> None:
    visible_devices()
    assert set(cuda.counters()) == {0}


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("1", ["GPU-11111111-bbbb-4bbb-8bbb-000000000002"]),
        ("MIG-33333333,0", [MIG.uuid, GPU.uuid]),
        ("GPU-11111111-b,7,0", [TWIN.uuid]),
        ("0,0", [GPU.uuid]),
    ],
)
def test_the_driver_shows_what_cuda_visible_devices_leaves(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, value: str, names: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    with FakeCuda() as another:  # a process reads the variable once, with the machine
        monkeypatch.setenv("FASTDEPLOY_RL_FAKE_CUDA", str(another.directory))
        found = visible_devices()
    assert [device.uuid for device in found] == names
    assert [device.index for device in found] == list(range(len(names)))


def test_each_entry_of_cuda_visible_devices_is_explained() -> None:
    entries = explain_selection(f"{MIG.uuid}, 1,GPU-9,0", [MIG, TWIN])
    assert [entry.device for entry in entries] == [MIG, TWIN, None, None]
    assert [bool(entry.reason) for entry in entries] == [False, False, True, True]
    assert "names no device of this machine" in entries[2].reason
    assert "an entry before it" in entries[3].reason
    assert "no CUDA device is called" in explain_selection("all", [])[0].reason
    assert explain_selection("", []) == []


# --- reasons


def test_without_a_driver_the_reason_names_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTDEPLOY_RL_LIBCUDA", "/nowhere/libcuda.so.1")
    for call in (open_driver, visible_devices):
        with pytest.raises(CudaUnavailableError, match=r"no CUDA driver: /nowhere/libcuda\.so\.1"):
            call()


def test_a_library_that_is_no_driver_is_refused_by_the_call_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTDEPLOY_RL_LIBCUDA", "libm.so.6")
    with pytest.raises(CudaUnavailableError, match=r"libm\.so\.6 has no cuInit"):
        visible_devices()


def test_a_driver_without_devices_says_what_may_hide_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    with FakeCuda() as cuda:
        for name, value in cuda.environ.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(CudaUnavailableError, match=r"CUDA_ERROR_NO_DEVICE.*CUDA_VISIBLE_DEVICES='5'"):
            visible_devices()


def test_a_fake_machine_has_a_bounded_number_of_devices() -> None:
    with pytest.raises(ConfigurationError, match="at most 16 devices"):
        FakeCuda([FakeDevice("Fake", GPU.uuid.removeprefix("GPU-"))] * 17)
