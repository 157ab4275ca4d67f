"""What we say of the parameters of FastDeploy's layers, against what FastDeploy's loaders make of whole tensors."""

from collections.abc import Iterator

import pytest

from tests.engines.fastdeploy.real_tree import RealPeer, skip_without_real_tree

skip_without_real_tree()


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPeer]:
    with RealPeer(tmp_path_factory.mktemp("fastdeploy")) as peer:
        yield peer


@pytest.mark.parametrize("num_ranks", [2, 4])  # of two key and value heads: four ranks have each of them twice
@pytest.mark.parametrize(("model_format", "is_done"), [("paddle", True), ("torch", False), ("torch", True)])
@pytest.mark.parametrize("is_sequence_parallel", [False, True])
def test_each_rank_has_of_the_whole_what_we_say(
    peer: RealPeer, num_ranks: int, model_format: str, is_done: bool, is_sequence_parallel: bool
) -> None:
    found = peer.call(
        "real_layers.cuts",
        num_ranks=num_ranks,
        model_format=model_format,
        is_sequence_parallel=is_sequence_parallel,
        is_done=is_done,
    )
    is_out_in = model_format == "torch" and not is_done
    assert found["wrong"] == []
    assert found["each_rank"] == ([] if is_sequence_parallel else ["row.bias"])
    assert found["whole"]["column.weight"] == ([128, 64, 0] if is_out_in else [64, 128, 1])
    assert found["whole"]["gate.weight"][2] is None
    assert found["whole"]["embed_tokens.embeddings.weight"] == [256, 64, 0]
    if is_sequence_parallel:
        assert found["whole"]["row.weight"][2] is None
    else:
        assert found["whole"]["row.weight"] == ([64, 128, 1] if is_out_in else [128, 64, 0])
    assert found["parts"]["qkv_proj.weight"] == ["q_proj.weight", "k_proj.weight", "v_proj.weight"]
    assert found["parts"]["up_gate_proj.bias"] == ["gate_proj.bias", "up_proj.bias"]
