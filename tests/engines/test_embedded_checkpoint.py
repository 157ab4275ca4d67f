"""Checkpoints: every slice of every layout and dtype exact, and a broken one is one clear error."""

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tiny_llama import config, generate, make_checkpoint, open_runner, random_tensors, run_python

from fastdeploy_rl.coverage import Coverage
from fastdeploy_rl.engines.embedded.checkpoint import Checkpoint, save_checkpoint
from fastdeploy_rl.engines.embedded.model_config import RopeScaling, parameter_specs, read_config
from fastdeploy_rl.errors import CheckpointError, ConfigurationError
from fastdeploy_rl.memory import file_map

LAYER = "model.layers.0.self_attn.q_proj.weight"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model")


def stored(directory: Path) -> dict[str, np.ndarray]:
    with Checkpoint.open(directory) as checkpoint:
        return dict(checkpoint.tensors())


def read_header(path: Path) -> tuple[dict[str, dict[str, object]], bytes]:
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def write_file(path: Path, header: dict[str, dict[str, object]], data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def change_header(directory: Path, change: Callable[[dict[str, dict[str, object]]], object]) -> None:
    header, data = read_header(directory / "model.safetensors")
    change(header)
    write_file(directory / "model.safetensors", header, data)


def change_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_what_was_saved_is_read_back_bitwise(directory: Path) -> None:
    expected = random_tensors(directory, seed=0)
    actual = stored(directory)
    assert actual.keys() == expected.keys()
    assert all(np.array_equal(actual[name], value) for name, value in expected.items())
    assert all(value.flags.c_contiguous and value.dtype == np.float32 for value in actual.values())


def test_saved_file_is_what_the_safetensors_library_reads_in_hugging_face_layout(directory: Path) -> None:
    from safetensors.numpy import load_file

    file = load_file(directory / "model.safetensors")
    tensors = random_tensors(directory, seed=0)
    assert np.array_equal(file[LAYER], tensors[LAYER].T)
    assert np.array_equal(file["model.embed_tokens.weight"], tensors["model.embed_tokens.weight"])


def test_saving_twice_gives_the_same_bytes(directory: Path, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "again", config(), dict(reversed(stored(directory).items())))
    assert (tmp_path / "again/model.safetensors").read_bytes() == (directory / "model.safetensors").read_bytes()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_slices_of_all_ranks_tile_every_tensor(directory: Path, num_ranks: int) -> None:
    whole = stored(directory)
    with Checkpoint.open(directory) as checkpoint:
        axes = {spec.name: spec.shard_axis for spec in checkpoint.specs}
        ranks = [checkpoint.load(rank, num_ranks) for rank in range(num_ranks)]
    for name, expected in whole.items():
        slices = [views[name].numpy() for views in ranks]
        joined = slices[0] if axes[name] is None else np.concatenate(slices, axis=axes[name])
        assert np.array_equal(joined, expected), name


def test_slices_lie_in_one_arena_at_aligned_offsets(directory: Path) -> None:
    with Checkpoint.open(directory) as checkpoint:
        views = checkpoint.load(0, 2)
    assert len({id(view.mapping) for view in views.values()}) == 1
    assert all(view.offset % 512 == 0 for view in views.values())


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_half_precision_is_widened_exactly(directory: Path, dtype: str) -> None:
    header, data = read_header(directory / "model.safetensors")
    metadata = header.pop("__metadata__")
    values = np.frombuffer(data, np.float32)
    halves = values.astype(np.float16) if dtype == "F16" else (values.view(np.uint32) >> 16).astype(np.uint16)
    for entry in header.values():
        entry |= {"dtype": dtype, "data_offsets": [offset // 2 for offset in entry["data_offsets"]]}
    expected = stored(directory)
    write_file(directory / "model.safetensors", {"__metadata__": metadata} | header, halves.tobytes())
    for name, value in stored(directory).items():
        bits = (expected[name].view(np.uint32) & 0xFFFF0000).view(np.float32)
        assert np.array_equal(value, expected[name].astype(np.float16) if dtype == "F16" else bits)


def test_shards_are_found_through_the_index(directory: Path) -> None:
    expected = stored(directory)
    split_into_shards(directory)
    actual = stored(directory)
    assert actual.keys() == expected.keys()
    assert all(np.array_equal(actual[name], value) for name, value in expected.items())


def split_into_shards(directory: Path) -> None:
    header, data = read_header(directory / "model.safetensors")
    header.pop("__metadata__")
    (directory / "model.safetensors").unlink()
    shards = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(header)}
    for shard in set(shards.values()):
        write_file(directory / shard, *subset(header, data, [name for name in header if shards[name] == shard]))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def subset(header: dict, data: bytes, names: list[str]) -> tuple[dict, bytes]:
    chosen, taken = {}, b""
    for name in names:
        start, stop = header[name]["data_offsets"]
        chosen[name] = header[name] | {"data_offsets": [len(taken), len(taken) + stop - start]}
        taken += data[start:stop]
    return chosen, taken


@pytest.mark.parametrize("is_tied", [False, True])
def test_checkpoint_saved_by_paddleformers_is_read(tmp_path: Path, is_tied: bool) -> None:
    """It writes Hugging Face's layout, in shards, with a tied head spelled out."""
    source = make_checkpoint(tmp_path / "model", tie_word_embeddings=is_tied)
    job = {"directory": str(source), "save_to": str(tmp_path / "saved")}
    run_python("paddleformers_reference.py", job)
    expected, actual = stored(source), stored(tmp_path / "saved")
    assert actual.keys() == expected.keys()
    assert all(np.array_equal(actual[name], value) for name, value in expected.items())
    assert read_config(tmp_path / "saved") == read_config(source)


def test_no_such_directory_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no such model directory: .*/nowhere"):
        Checkpoint.open(tmp_path / "nowhere")


def test_truncated_file_names_file_and_tensor(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: truncated: tensor model\.norm\.weight ends at byte"
    ):
        Checkpoint.open(directory)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "truncated: 0 bytes"),
        (b"\xff" * 64, "truncated or no safetensors file"),
        ((4).to_bytes(8, "little") + b"nope", "header is not a JSON object"),
        ((2).to_bytes(8, "little") + b"[]", "header is not a JSON object"),
        ((7).to_bytes(8, "little") + b'{"a":1}', "tensor a: broken header entry"),
    ],
)
def test_file_that_is_no_safetensors_is_named(directory: Path, data: bytes, message: str) -> None:
    (directory / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {message}"):
        Checkpoint.open(directory)


@pytest.mark.parametrize(("bound", "message"), [("MAX_TENSORS", "more than 3 tensors"), ("MAX_COMMAS", "3 commas")])
def test_header_beyond_a_bound_is_refused_with_what_it_has_too_many_of(
    directory: Path, monkeypatch: pytest.MonkeyPatch, bound: str, message: str
) -> None:
    monkeypatch.setattr(file_map, bound, 3)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: header of \d+ bytes has .*{message}"):
        Checkpoint.open(directory)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header.pop(LAYER), f"missing {LAYER}; surplus none"),
        (lambda header: header.update(odd=header.pop(LAYER)), f"missing {LAYER}; surplus odd"),
        (lambda header: header[LAYER].update(shape=[24, 96]), rf"{LAYER}: expected shape \[48, 48\], got \[24, 96\]"),
        (lambda header: header[LAYER].update(dtype="I32"), f"{LAYER}: expected dtype F32 or BF16 or F16, got I32"),
        (lambda header: header[LAYER].update(dtype="F64"), f"{LAYER}: shape .* does not fit"),
        (lambda header: header[LAYER].update(dtype="F31"), f"{LAYER}: broken header entry: unknown dtype"),
        (lambda header: header[LAYER].update(shape=[-48, -48]), f"{LAYER}: broken header entry"),
        (lambda header: header[LAYER].update(data_offsets=[0, 48 * 48 * 4]), "overlap"),
        (lambda header: header[LAYER].update(data_offsets=[-4, 48 * 48 * 4 - 4]), f"{LAYER}: broken header entry"),
        (lambda header: header[LAYER].update(more=1), f"{LAYER}: broken header entry"),
    ],
)
def test_wrong_tensor_is_named(directory: Path, change: Callable[[dict], object], message: str) -> None:
    change_header(directory, change)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(directory)


def test_tied_head_with_another_value_is_refused(directory: Path) -> None:
    change_config(directory, tie_word_embeddings=True)
    with (
        Checkpoint.open(directory) as checkpoint,
        pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"),
    ):
        checkpoint.load(0, 1)


def test_tied_head_is_compared_where_this_rank_has_it(directory: Path) -> None:
    """Rows of other ranks are not read."""
    expected = stored(directory)["model.embed_tokens.weight"]
    header, data = read_header(directory / "model.safetensors")
    start = header["lm_head.weight"]["data_offsets"][0]
    head = expected.copy()
    head[-1] += 1
    data = data[:start] + head.tobytes() + data[start + head.nbytes :]
    write_file(directory / "model.safetensors", header, data)
    change_config(directory, tie_word_embeddings=True)
    with Checkpoint.open(directory) as checkpoint:
        views = checkpoint.load(0, 2)
        with pytest.raises(CheckpointError, match=r"lm_head\.weight differs"):
            checkpoint.load(1, 2)
    assert np.array_equal(views["model.embed_tokens.weight"].numpy(), expected[:48])


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({LAYER: "../model.safetensors"}, r"expected the name of a \.safetensors file in this directory, got '\.\./"),
        ({LAYER: "/etc/model.safetensors"}, r"expected the name of a \.safetensors file"),
        ({LAYER: ".."}, r"expected the name of a \.safetensors file"),
        ({LAYER: "config.json"}, r"expected the name of a \.safetensors file"),
        ({LAYER: 7}, "no index of a checkpoint: Expected `str`, got `int`"),
        ({LAYER: "gone.safetensors", "odd": "model.safetensors"}, "gone.safetensors: No such file, but .*index.json"),
        ({LAYER: "a pipe.safetensors", "odd": "model.safetensors"}, "a pipe.safetensors: no regular file"),
        ({LAYER: "model.safetensors"}, "is here, but model.safetensors.index.json does not name it"),
        ({LAYER: "other.safetensors"}, "model.safetensors and model.safetensors.index.json are both here"),
        ({"odd": "model.safetensors"}, "tensor odd is missing"),
        ([], "no index of a checkpoint: Expected `object`, got `array`"),
        ({}, "weight_map names no tensor"),
    ],
)
def test_broken_index_is_named(directory: Path, weight_map: object, message: str) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    os.mkfifo(directory / "a pipe.safetensors")
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(directory)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
def test_a_pipe_in_a_files_place_is_not_waited_for(directory: Path, name: str) -> None:
    (directory / name).unlink(missing_ok=True)
    os.mkfifo(directory / name)
    with pytest.raises(CheckpointError, match=f"{name}: no regular file"):
        Checkpoint.open(directory)


def test_tensor_in_two_shards_names_file_and_tensor(directory: Path) -> None:
    split_into_shards(directory)
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    name = next(name for name, shard in index.items() if shard == "part-0.safetensors")
    header, data = read_header(directory / "part-1.safetensors")
    other_header, other_data = read_header(directory / "part-0.safetensors")
    start, stop = other_header[name]["data_offsets"]
    header[name] = other_header[name] | {"data_offsets": [len(data), len(data) + stop - start]}
    write_file(directory / "part-1.safetensors", header, data + other_data[start:stop])
    message = rf"part-1\.safetensors: tensor {name} is here, but .*index\.json says that it is in part-0\.safetensors"
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(directory)


def test_weights_that_the_index_does_not_name_are_not_read_and_said(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = stored(directory)
    split_into_shards(directory)
    (directory / "consolidated.safetensors").write_bytes(b"of another tool")
    actual = stored(directory)
    assert all(np.array_equal(actual[name], value) for name, value in expected.items())
    assert "fault=unused_weights" in caplog.text
    assert "consolidated.safetensors" in caplog.text


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 6])
def test_vocabulary_that_does_not_divide_is_padded_with_zeros(tmp_path: Path, num_ranks: int) -> None:
    directory = make_checkpoint(tmp_path / "model", vocab_size=97)
    expected = stored(directory)
    padded = -(-97 // num_ranks) * num_ranks
    with Checkpoint.open(directory) as checkpoint:
        ranks = [checkpoint.load(rank, num_ranks) for rank in range(num_ranks)]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        joined = np.concatenate([views[name].numpy() for views in ranks])
        assert joined.shape == (padded, 48)
        assert np.array_equal(joined[:97], expected[name])
        assert not joined[97:].any()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"model_type": "mamba"},
            ConfigurationError,
            "model_type: this engine computes 'llama', 'qwen2', 'qwen3', the model needs 'mamba'",
        ),
        ({"hidden_act": "gelu"}, ConfigurationError, "hidden_act"),
        ({"model_type": None}, ConfigurationError, "model_type: .* the model needs None"),
        ({"model_type": ["llama"]}, ConfigurationError, "model_type: .* the model needs .'llama'."),
        ({"use_sliding_window": True}, ConfigurationError, "use_sliding_window"),
        ({"use_mrope": True}, ConfigurationError, "use_mrope"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ConfigurationError, "layer_types"),
        ({"quantization_config": {"quant_method": "fp8"}}, ConfigurationError, "quantization_config: .*fp8"),
        ({"partial_rotary_factor": 0.5}, ConfigurationError, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ConfigurationError, "rope_scaling: .* needs 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, ConfigurationError, "rope_scaling: .* needs 'linear'"),
        ({"rope_scaling": ["llama3"]}, ConfigurationError, "rope_scaling"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ConfigurationError, "rope_parameters: .*whole heads"),
        ({"rope_parameters": {"full_attention": {}}}, ConfigurationError, "rope_parameters: .*in all layers"),
        ({"rope_scaling": {"rope_type": "llama3"}}, CheckpointError, "low_freq_factor: expected a positive number"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, CheckpointError, "4.0 must be less than high_freq"),
        ({"rope_scaling": LLAMA3 | {"factor": "8"}}, CheckpointError, "factor: expected a positive number, got '8'"),
        ({"attention_bias": "no"}, CheckpointError, "attention_bias: expected true or false"),
        ({"hidden_size": 50}, CheckpointError, "num_attention_heads 6 does not divide hidden_size 50"),
        ({"hidden_size": "48"}, CheckpointError, "hidden_size: expected a positive integer, got '48'"),
        ({"vocab_size": 0}, CheckpointError, "vocab_size: expected a positive integer, got 0"),
        ({"rms_norm_eps": -1}, CheckpointError, "rms_norm_eps: expected a positive number"),
        ({"tie_word_embeddings": 1}, CheckpointError, "tie_word_embeddings: expected true or false"),
        ({"eos_token_id": "x"}, CheckpointError, "eos_token_id: expected a token id"),
        ({"num_attention_heads": 5}, CheckpointError, "num_attention_heads 5 does not divide hidden_size 48"),
        ({"num_key_value_heads": 4}, CheckpointError, "num_key_value_heads 4 does not divide num_attention_heads 6"),
        ({"head_dim": 7}, CheckpointError, "head_dim: rotary embeddings need an even size"),
    ],
)
def test_config_the_engine_cannot_run_is_named(
    directory: Path, changes: dict[str, object], error: type[Exception], message: str
) -> None:
    change_config(directory, **changes)
    with pytest.raises(error, match=message):
        read_config(directory)


@pytest.mark.parametrize(("text", "message"), [("{", "not a JSON object"), ("[]", "not a JSON object")])
def test_config_that_is_no_json_is_named(directory: Path, text: str, message: str) -> None:
    (directory / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"config\.json: {message}"):
        read_config(directory)


def test_missing_config_is_named(directory: Path) -> None:
    (directory / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: No such file"):
        read_config(directory)


@pytest.mark.parametrize("num_ranks", [0, 4, 5])
def test_rank_count_that_does_not_divide_names_what_and_what_would(directory: Path, num_ranks: int) -> None:
    message = rf"does not split over {num_ranks} ranks: .*num_attention_heads 6.*can be 1, 2, 3, 6"
    with pytest.raises(ConfigurationError, match=message):
        read_config(directory).check_divides(num_ranks)


@pytest.mark.parametrize(
    ("kind", "kv_heads", "head_dim", "positions"),
    [("llama", 64, 32, 2048), ("qwen2", 32, 32, 32768), ("qwen3", 32, 128, 32768)],
)
def test_what_a_config_leaves_out_is_what_transformers_takes(
    directory: Path, kind: str, kv_heads: int, head_dim: int, positions: int
) -> None:
    sizes = {"hidden_size": 2048, "num_attention_heads": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    (directory / "config.json").write_text(json.dumps({"model_type": kind, "vocab_size": 96} | sizes))
    read = read_config(directory)
    assert (read.num_key_value_heads, read.head_dim, read.max_position_embeddings) == (kv_heads, head_dim, positions)
    assert (read.rms_norm_eps, read.rope_theta, read.tie_word_embeddings) == (1e-6, 10000.0, False)


PUBLISHED = {
    "Qwen2.5-0.5B": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 21,
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "use_mrope": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Qwen3-0.6B": {
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 128,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Llama-3.2-1B": {
        "model_type": "llama",
        "attention_bias": False,
        "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "vocab_size": 128256,
    },
}


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [("Qwen2.5-0.5B", 494_032_768), ("Qwen3-0.6B", 596_049_920), ("Llama-3.2-1B", 1_235_814_400)],
)
def test_published_models_have_as_many_parameters_as_they_are_said_to(
    directory: Path, name: str, num_parameters: int
) -> None:
    (directory / "config.json").write_text(json.dumps({"hidden_act": "silu", "eos_token_id": [2, 3]} | PUBLISHED[name]))
    config = read_config(directory)
    specs = [spec for spec in parameter_specs(config) if spec.coverage is Coverage.UPDATED]
    assert sum(math.prod(spec.shape) for spec in specs) == num_parameters
    assert config.rope_scaling == (RopeScaling(32.0, 1.0, 4.0, 8192) if name.startswith("Llama") else None)


def test_stop_tokens_of_both_files_count(directory: Path) -> None:
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert read_config(directory).eos_token_ids == (2, 7)


def test_rope_theta_of_newer_configurations_is_read(directory: Path) -> None:
    change_config(directory, rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert read_config(directory).rope_theta == 5e5


def test_open_checkpoint_does_not_depend_on_the_file_afterwards(directory: Path) -> None:
    """The engine keeps its own copy: a checkpoint may be deleted under a running engine."""
    runner = open_runner(directory)
    expected = generate(runner, [[5, 6, 7]], 8).tokens
    shutil.rmtree(directory)
    assert generate(runner, [[5, 6, 7]], 8).tokens == expected
