"""State dicts as Paddle writes them, read without pickle: what is real is found in place, what is hostile is refused by
name and never executed."""

import contextlib
import os
import pickle
import pickletools
import struct
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save as save_safetensors

from fastdeploy_rl.errors import CheckpointError
from fastdeploy_rl.memory import inert_pickle, saved_state
from fastdeploy_rl.memory.saved_state import (
    NAME_TABLE,
    SavedArray,
    is_saved_state,
    read_saved_file,
    read_saved_state,
    write_saved_state,
)

ARRAYS: dict[str, Any] = {
    "layer.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "half": np.array([0x3F80, 0x4000], np.uint16),
    "scalar": np.array(3.5, np.float64),
    "empty": np.zeros((0, 3), np.int64),
    "empty too": np.zeros(0, np.int64),
    "mask": np.array([True, False]),
    "one": np.array([1], np.uint8),
    "one too": np.array([1], np.uint8),
    "long": np.arange(1000, dtype=np.int32),
}
DTYPES = {"layer.weight": "F32", "half": "BF16", "scalar": "F64", "mask": "BOOL", "one": "U8", "long": "I32"}


def saved(protocol: int = 4, arrays: dict[str, Any] = ARRAYS) -> bytes:
    """As `paddle.save` does with a state dict."""
    return pickle.dumps({**arrays, NAME_TABLE: {name: f"param_{name}" for name in arrays}}, protocol)


def values(data: bytes) -> dict[str, bytes]:
    """Each tensor's bytes as they lie in the data."""
    return {t.name: data[t.offset : t.offset + t.num_bytes] for t in read_saved_state(data).tensors.values()}


# --- what is real ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_tensors_are_found_in_place(protocol: int) -> None:
    data = saved(protocol)
    found = read_saved_state(data).tensors
    assert list(found) == list(ARRAYS)
    assert values(data) == {name: array.tobytes() for name, array in ARRAYS.items()}
    assert {name: tensor.shape for name, tensor in found.items()} == {n: array.shape for n, array in ARRAYS.items()}
    assert {name: found[name].dtype for name in DTYPES} == DTYPES


def test_arrays_of_numpy_2_are_read_too() -> None:
    old, new = b"\x8c\x15numpy.core.multiarray", b"\x8c\x16numpy._core.multiarray"
    data = saved().replace(old, new)
    assert new in data
    assert values(data) == values(saved())


def test_buffers_of_numpy_2_are_read_too() -> None:
    old, new = b"\x8c\x12numpy.core.numeric", b"\x8c\x13numpy._core.numeric"
    data = saved(5).replace(old, new)
    assert new in data
    assert values(data) == values(saved())


def test_what_paddle_takes_for_no_state_dict_is_read_too() -> None:
    """It then has no table of names; each tensor is a tuple of its name and its array."""

    class Tensor:
        def __reduce__(self) -> Any:
            return tuple, (("linear_0.w_0", ARRAYS["layer.weight"]),)

    data = pickle.dumps(OrderedDict(weight=Tensor(), bias=ARRAYS["long"]), 4)
    assert values(data) == {"weight": ARRAYS["layer.weight"].tobytes(), "bias": ARRAYS["long"].tobytes()}


def test_an_array_under_two_names_is_told_as_one() -> None:
    array = np.arange(4.0)
    found = read_saved_state(pickle.dumps({"embed": array, "head": array}, 4))
    assert list(found.tensors) == ["embed"]
    assert found.aliases == {"head": "embed"}


def test_a_file_is_read_as_its_bytes_are(tmp_path: Path) -> None:
    path = tmp_path / "model.pdparams"
    path.write_bytes(saved())
    assert read_saved_file(path) == read_saved_state(saved())


def test_more_tensors_than_one_batch_of_a_pickle_are_read() -> None:
    arrays = {f"layer.{index}": np.full(3, index, np.float32) for index in range(3000)}
    assert values(saved(4, arrays)) == {name: array.tobytes() for name, array in arrays.items()}


def test_any_buffer_is_read() -> None:
    for data in (bytearray(saved()), memoryview(saved()), np.frombuffer(saved(), np.uint8)):
        assert list(read_saved_state(data).tensors) == list(ARRAYS)


def test_a_safetensors_file_is_told_apart_although_it_begins_alike() -> None:
    assert is_saved_state(saved(4)[:9])
    assert is_saved_state(saved(2)[:9])
    assert is_saved_state(b"".join(map(bytes, write_saved_state({})))[:9])
    lookalike = struct.pack("<Q", 0x0480) + b"{"
    assert inert_pickle.is_pickle(lookalike)
    assert not is_saved_state(lookalike)
    assert not is_saved_state(save_safetensors({"w": np.zeros(3)})[:9])
    assert not is_saved_state(b"")


# --- what is real and cannot be used in place ---------------------------------------------------------------


def refused(data: bytes, match: str) -> None:
    with pytest.raises(CheckpointError, match=match) as caught:
        read_saved_state(data, "model.pdparams")
    assert str(caught.value).startswith("model.pdparams: ")
    assert str(caught.value).endswith("nothing was executed")


def test_protocol_2_is_refused_with_the_way_out() -> None:
    refused(saved(2), r"tensor layer\.weight is stored as text \(pickle protocol 2\); save it with .*protocol=4")
    refused(saved(2, {"w": np.arange(9999.0)}), "tensor w is stored as text")


def test_tensors_in_pieces_are_refused_with_the_way_out() -> None:
    pieces = {"w@@.0": np.zeros(2), "UnpackBigParamInfor@@": {"w": {"OriginShape": (2,), "slices": ["w@@.0"]}}}
    refused(pickle.dumps(pieces, 3), r"more than 1 GiB are in pieces; save it with .*protocol=4")


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.asfortranarray(np.zeros((2, 3))), "w is in Fortran order"),
        (np.zeros(2, ">f4"), "w has byte order '>'; only little-endian"),
        (np.array([None, 1]), "w has dtype 'O8'"),
        (np.array(["text"]), "w has dtype 'U4'"),
        (np.zeros(2, np.complex64), "w has dtype 'c8'"),
        (np.zeros(2, np.uint32), "w has dtype 'u4'"),
        (np.zeros((1,) * 9), "w has 9 dimensions; at most 8"),
        (7, "entry 'w' is int, not a tensor"),
        (None, "entry 'w' is None, not a tensor"),
        ({}, "entry 'w' is a dict, not a tensor"),
    ],
)
@pytest.mark.parametrize("protocol", [4, 5])
def test_what_is_no_tensor_for_us_is_refused_by_name(array: Any, said: str, protocol: int) -> None:
    refused(pickle.dumps({"good": np.zeros(2), "w": array}, protocol), said)


def test_a_row_in_fortran_order_is_one_in_c_order() -> None:
    array = np.arange(3.0)
    assert values(pickle.dumps({"w": np.asfortranarray(array.reshape(1, 3))}, 5)) == {"w": array.tobytes()}


def test_records_and_numbers_are_refused() -> None:
    refused(pickle.dumps({"w": np.zeros(2, [("a", "f4")])}, 4), "a dtype takes no such state|dtype 'V4'")
    refused(pickle.dumps({"lr": 0.5}, 4), "opcode 0x47 'G' has no place")
    refused(pickle.dumps({"lr": np.float32(0.5)}, 4), r"'numpy\.core\.multiarray'\.'scalar' has no place")
    refused(pickle.dumps([np.zeros(2)], 4), "it holds a tuple or list, not a state dict")
    refused(pickle.dumps({1: np.zeros(2)}, 4), "a key of a dict is int, not text")


# --- what is hostile ----------------------------------------------------------------------------------------


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


PROTO = b"\x80\x04"
DANGEROUS = [
    ("os", "system"),
    ("builtins", "eval"),
    ("builtins", "exec"),
    ("builtins", "getattr"),
    ("antigravity", "x"),
]


@pytest.mark.parametrize(("module", "name"), DANGEROUS)
@pytest.mark.parametrize("form", ["GLOBAL", "STACK_GLOBAL", "INST", "OBJ"])
def test_nothing_is_imported_or_called(module: str, name: str, form: str, tmp_path: Path) -> None:
    argument = text(f"touch {tmp_path}/executed")
    loaded = set(sys.modules)
    data = {
        "GLOBAL": b"c" + f"{module}\n{name}\n".encode() + argument + b"\x85R.",
        "STACK_GLOBAL": text(module) + text(name) + b"\x93" + argument + b"\x85R.",
        "INST": b"(" + argument + b"i" + f"{module}\n{name}\n".encode() + b".",
        "OBJ": b"(c" + f"{module}\n{name}\n".encode() + argument + b"o.",
    }[form]
    refused(PROTO + data, "has no place in a state dict")
    assert list(tmp_path.iterdir()) == []
    assert set(sys.modules) == loaded


def test_the_reader_has_no_opcode_that_a_real_state_dict_does_not_need() -> None:
    used = {
        op.code
        for protocol in (2, 3, 4, 5)
        for op, _, _ in pickletools.genops(saved(protocol, ARRAYS | {"big": np.zeros(70_000)}))
    }
    read = set(saved_state._Reader.OPCODES) | {"\x80", "."}
    assert used <= read
    # One more than a test can have: bytes of 4 GiB, texts of 4 GiB, a list of one, and what is left of Python 2.
    assert read - used <= {"\x8e", "\x8d", "]", "a", "e", "s", "r", "j", "\x8a", "M", "c", "q", "h", "B"}


OTHERS = [op for op in pickletools.opcodes if op.code not in saved_state._Reader.OPCODES and op.code not in "\x80."]


@pytest.mark.parametrize("op", OTHERS, ids=lambda op: op.name)
def test_every_other_opcode_is_refused_where_it_stands(op: Any) -> None:
    assert len(OTHERS) > 25
    for before in (b"", b"}", b"(", text("os") + text("system")):
        refused(PROTO + before + op.code.encode("latin-1") + b"0\n" * 8 + b".", f"byte {len(before) + 2}: opcode")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no state dict of paddle.save"),
        (b"\x80", "no state dict of paddle.save"),
        (b"\x80\x01}.", "no state dict of paddle.save"),
        (b"\x80\x06}.", "no state dict of paddle.save"),
        (PROTO + b".", "it ends with 0 values"),
        (PROTO + b"}}.", "it ends with 2 values"),
        (PROTO + b"}(.", "1 marks"),
        (PROTO + b"}.}", "1 bytes left over"),
        (PROTO + b"(" * 100, "more than 16 marks"),
        (PROTO + b")" + b"\x85" * 100, "containers more than 16 deep"),
        (PROTO + b"}" + (text("a") + b"}") * 100 + b"s" * 100, "containers more than 16 deep"),
        (PROTO + b")" + b"\x94h\x00\x86" + b"".join(b"\x94h" + bytes([n]) + b"\x86" for n in range(1, 100)), "16 deep"),
        (PROTO + b"]\x94h\x00a.", "a tuple or list holds itself"),
        (PROTO + b"]\x94]h\x00a" + b"h\x00Na", "changes after it was put into another one"),
        (PROTO + b"}" + text("a") + b"N" + b"s" + text("a") + b"Ns.", "'a' is named twice"),
        (PROTO + b"h\x00.", "value 0 was not remembered"),
        (PROTO + b"j\xff\xff\xff\xff.", "value 4294967295 was not remembered"),
        (PROTO + b"\x94.", "takes more than there is"),
        (PROTO + b"}(s.", "takes more than there is"),
        (PROTO + b"}(Nu.", "1 keys and values are to go into a dict"),
        (PROTO + b"N(u.", "0 keys and values are to go into None"),
        (PROTO + b"}NNb.", "takes no such state"),
        (PROTO + b"NNR.", "None cannot be called"),
        (PROTO + text("numpy") + text("ndarray") + b"\x93)R.", r"'numpy'\.'ndarray' cannot be called"),
        (PROTO + text("numpy") + text("dtype") + b"\x93NR.", r"'numpy'\.'dtype' cannot be called"),
        (PROTO + text("numpy") + text("dtype") + b"\x93)R.", "made of something else than its name"),
        (PROTO + text("builtins") + text("tuple") + b"\x93)R.", "a tuple is made of something else"),
        (PROTO + text("builtins") + text("bytes") + b"\x93K\x01\x85R.", "bytes are made of something"),
        (PROTO + text("collections") + text("OrderedDict") + b"\x93)\x85R.", "an OrderedDict is made of something"),
        (PROTO + text("_codecs") + text("encode") + b"\x93" + text("a") + text("rot13") + b"\x86R.", "latin1"),
        (PROTO + b"NN\x93.", "a name is made of None and None"),
        (PROTO + b"K\x01" + text("system") + b"\x93.", "a name is made of int and str"),
        (PROTO + b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\ndtype\n)C\x01b\x87R.", "else than an ndarray"),
        (PROTO + b"c" + b"a" * 5000 + b"\n", "a name of more than 4096 bytes"),
        (PROTO + b"X\x02\x00\x00\x00\xff\xfe.", "is not UTF-8"),
        (PROTO + b"\x8a\xff" + b"\xff" * 255 + b".", "an integer of 255 bytes"),
        (PROTO + b"\x8e" + b"\xff" * 8 + b".", "truncated: 18446744073709551615 bytes are to follow, 1 are left"),
        (PROTO + b"\x8d" + b"\xff" * 8 + b".", "truncated"),
        (PROTO + b"B\xff\xff\xff\xff.", "truncated"),
        (PROTO + b"\x95" + b"\xff" * 8 + b"}.", "truncated: a frame"),
        (PROTO + b"}" + text(NAME_TABLE) + b"Ns.", f"{NAME_TABLE} is None, not a dict"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_it_is(data: bytes, said: str) -> None:
    refused(data, said)


def _array(shape: bytes, data: bytes, kind: str = "f4", order: str = "<") -> bytes:
    made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"
    dtype = (
        b"cnumpy\ndtype\n"
        + text(kind)
        + b"\x89\x88\x87R(K\x03"
        + text(order)
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    )
    return made + b"(K\x01" + shape + dtype + b"\x89" + data + b"tb"


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (_array(b"K\x02\x85", b"C\x04abcd"), r"tensor w: 4 bytes are no F32 of shape \[2\]"),
        (_array(b"J\xff\xff\xff\xff\x85", b"C\x04abcd"), "tensor w has no shape of sizes"),
        (_array(b"\x88\x85", b"C\x04abcd"), "tensor w has no shape of sizes"),
        (_array(b"\x8a\x09" + b"\xff" * 8 + b"\x7f\x85", b"C\x00"), "tensor w has no shape of sizes"),
        (_array(b"N", b"C\x04abcd"), "tensor w has no shape of sizes"),
        (_array(b"K\x01\x85", b"N"), "tensor w: its data is None, not bytes"),
        (_array(b"K\x01\x85", b"]"), "tensor w: its data is a tuple or list, not bytes"),
        (_array(b"K\x01\x85", b"C\x04abcd", order="="), "tensor w has byte order '='"),
        (_array(b"K\x01\x85", b"C\x01a", kind="V1"), "tensor w has dtype 'V1'"),
        (_array(b"K\x01\x85", b"C\x04abcd")[: -len(b"\x89C\x04abcdtb")] + b"NC\x04abcdtb", "."),
        (_array(b"K\x01\x85", b"C\x04abcd") + b"(K\x01NNNNtb", "an array takes no such state"),
        (b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R", "is an array, not a tensor"),
    ],
)
def test_arrays_that_are_none_are_refused_by_name(entry: bytes, said: str) -> None:
    data = PROTO + b"}" + text("w") + entry + b"s."
    if said == ".":  # an order that is no truth value, of one row: harmless
        assert values(data) == {"w": b"abcd"}
        return
    refused(data, said)


def test_the_same_bytes_are_not_taken_for_two_tensors() -> None:
    """Else a small file would claim any amount of memory."""
    first, second = _array(b"K\x01\x85", b"C\x04abcd\x94"), _array(b"K\x01\x85", b"h\x00")
    refused(PROTO + b"}" + text("a") + first + b"s" + text("b") + second + b"s.", "tensors a and b overlap")


@pytest.mark.parametrize(
    ("bound", "bomb"),
    [
        ("MAX_OPS", b"N" * 200),
        ("MAX_STACK", b"}" * 200),
        ("MAX_MEMO", b"]" + b"\x94" * 200),
        ("MAX_MEMO", b"]" + (b"(" + b"}\x94" * 50 + b"e") * 3),
        ("MAX_OPS", b"]" + (b"(" + b"}" * 50 + b"e") * 3),
    ],
)
def test_how_much_a_file_may_say_is_bounded(monkeypatch: pytest.MonkeyPatch, bound: str, bomb: bytes) -> None:
    monkeypatch.setattr(inert_pickle, bound, 100)
    refused(PROTO + bomb, "more than 100")


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_a_file_that_ends_early_is_refused_wherever_it_ends(protocol: int) -> None:
    data = saved(protocol, {name: ARRAYS[name] for name in ("layer.weight", "half", "empty", "mask")})
    for length in range(len(data)):
        refused(data[:length], "truncated|no state dict|left over|marks")


@given(st.integers(3, 5), st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=6))
def test_changed_bytes_give_an_error_or_tensors_inside_the_file(protocol: int, changes: list[tuple[int, int]]) -> None:
    data = bytearray(saved(protocol, {name: ARRAYS[name] for name in ("layer.weight", "half", "one", "one too")}))
    for position, value in changes:
        data[position % len(data)] = value
    try:
        found = read_saved_state(data)
    except CheckpointError:
        return
    for tensor in found.tensors.values():
        assert 0 <= tensor.offset <= tensor.offset + tensor.num_bytes <= len(data)


@given(st.binary(max_size=200))
def test_any_bytes_give_an_error_or_nothing(data: bytes) -> None:
    with contextlib.suppress(CheckpointError):
        assert read_saved_state(PROTO + data) == ({}, {})


# --- files -----------------------------------------------------------------------------------------------


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    for name, said in (
        ("pipe", "no regular file"),
        ("", "no regular file"),
        ("none", "No such file"),
        ("empty", "no state"),
    ):
        with pytest.raises(CheckpointError, match=said):
            read_saved_file(tmp_path / name)
    with pytest.raises(CheckpointError, match="null"):
        read_saved_file(tmp_path / "a\0b")


# --- writing ---------------------------------------------------------------------------------------------


def written(arrays: dict[str, Any]) -> bytes:
    dtypes = {name: tensor.dtype for name, tensor in read_saved_state(saved(4, arrays)).tensors.items()}
    return b"".join(write_saved_state({n: SavedArray(dtypes[n], array.shape, array) for n, array in arrays.items()}))


def test_what_is_written_is_read_by_us_and_by_pickle() -> None:
    data = written(ARRAYS)
    assert values(data) == {name: array.tobytes() for name, array in ARRAYS.items()}
    loaded = pickle.loads(data)
    assert loaded.pop(NAME_TABLE) == {name: name for name in ARRAYS}
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(loaded[name], array)
        assert (loaded[name].dtype, loaded[name].shape) == (array.dtype, array.shape)


def test_tensors_are_written_from_where_they_lie() -> None:
    array = np.arange(4, dtype=np.float32)
    chunks = write_saved_state({"w": SavedArray("F32", (4,), array)})
    views = [chunk for chunk in chunks if isinstance(chunk, memoryview)]
    assert [np.shares_memory(np.frombuffer(view, np.uint8), array) for view in views] == [True]


def test_bytes_that_are_not_of_the_shape_are_not_written() -> None:
    with pytest.raises(CheckpointError, match="tensor w: 8 bytes are no F32 of"):
        list(write_saved_state({"w": SavedArray("F32", (3,), bytes(8))}))


def test_a_dtype_that_numpy_has_not_is_named() -> None:
    eight = SavedArray("F8_E4M3", (2,), b"\0\0")
    with pytest.raises(CheckpointError, match=r"tensor w: `paddle\.save` has no form for F8_E4M3"):
        b"".join(write_saved_state({"w": eight}))
