"""Real Paddle parameters: rebound to memory of ours, or filled where they lie elsewhere."""

from collections.abc import Iterator

import numpy as np
import paddle
import pytest
from paddle.base.framework import EagerParamBase

from fastdeploy_rl import _native
from fastdeploy_rl.coverage import Coverage
from fastdeploy_rl.engines.fastdeploy import model_weights
from fastdeploy_rl.engines.fastdeploy.model_weights import ModelWeights, check_patterns, shared_parameters
from fastdeploy_rl.errors import ChecksumMismatchError, ConfigurationError, CoverageError
from fastdeploy_rl.memory.tensor_view import TensorView
from fastdeploy_rl.model_group import _as_in_group

Views = dict[str, TensorView]
BITS = {"BF16": lambda floats: floats.view(np.uint32) >> 16, "F8_E4M3": lambda floats: np.abs(floats).astype(np.uint8)}
"""Of types that numpy has not."""


class Decoder(paddle.nn.Layer):
    """Every way in which a parameter can be: made lazily, tied, a buffer, a scalar, empty, and turned (`filled`)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(4, 6)
        self.tied = self.linear
        turned = EagerParamBase.from_tensor(paddle.zeros([6, 4]).t())
        self.add_parameter("filled", turned)
        self.register_buffer("scale", paddle.to_tensor(1.0))
        self.register_buffer("codes", paddle.zeros([3, 4], dtype="int8"))
        self.register_buffer("small", paddle.zeros([4]).cast("float8_e4m3fn"))
        self.register_buffer("norm", paddle.ones([4], dtype="bfloat16"))
        self.register_buffer("nothing", paddle.zeros([0, 4]))
        self.register_buffer("table", paddle.zeros([2]), persistable=False)

    def forward(self, inputs: paddle.Tensor) -> paddle.Tensor:
        return (
            self.linear(inputs * self.norm.cast("float32")) @ self.filled.t() * self.scale
            + self.small.cast("float32")
            + self.codes.sum()
        )


def lazy_decoder() -> Decoder:
    with paddle.LazyGuard():
        return Decoder()


def make_views(memory: _native.Mapping, weights: ModelWeights, seed: int) -> Views:
    random, views, offset = np.random.default_rng(seed), {}, 0
    for spec in weights.specs:
        if spec.coverage is Coverage.UPDATED:
            view = TensorView(memory, offset, spec.dtype, spec.local_shape(weights.num_ranks))
            values = random.standard_normal(view.shape, dtype=np.float32) * 8
            view.numpy()[...] = BITS.get(spec.dtype, lambda floats: floats)(values)
            views[spec.name] = view
            offset += -(-view.num_bytes // 64) * 64
    return views


@pytest.fixture
def memory() -> Iterator[tuple[_native.Mapping, _native.Mapping]]:
    """Of two versions; nothing lies in it when a test is done."""
    mappings = _native.Mapping.private(4096), _native.Mapping.private(4096)
    yield mappings
    for mapping in mappings:
        assert mapping.num_exports == 0
        mapping.close()


Memory = tuple[_native.Mapping, _native.Mapping]


def answer(model: paddle.nn.Layer) -> bytes:
    return np.asarray(model(paddle.full([2, 4], 0.5)).numpy()).tobytes()


def expected(views: Views) -> bytes:
    """The forward pass by a model of its own, of copies."""
    model = Decoder()
    for name, view in views.items():
        array = np.array(view.numpy())
        value = paddle.to_tensor(array).view(model.state_dict()[name].dtype) if array.size else None
        with paddle.no_grad():
            if value is not None:
                model.state_dict()[name].copy_(value, True)
    return answer(model)


def test_everything_in_the_state_dict_is_a_parameter_and_one_memory_is_one() -> None:
    weights = ModelWeights(lazy_decoder(), 0, 1)
    assert {spec.name: (spec.dtype, spec.shape, spec.coverage, spec.tied_to) for spec in weights.specs} == {
        "filled": ("F32", (4, 6), Coverage.UPDATED, None),
        "scale": ("F32", (), Coverage.UPDATED, None),
        "codes": ("I8", (3, 4), Coverage.UPDATED, None),
        "small": ("F8_E4M3", (4,), Coverage.UPDATED, None),
        "norm": ("BF16", (4,), Coverage.UPDATED, None),
        "nothing": ("F32", (0, 4), Coverage.UPDATED, None),
        "linear.weight": ("F32", (4, 6), Coverage.UPDATED, None),
        "linear.bias": ("F32", (6,), Coverage.UPDATED, None),
        "tied.weight": ("F32", (4, 6), Coverage.TIED, "linear.weight"),
        "tied.bias": ("F32", (6,), Coverage.TIED, "linear.bias"),
    }
    assert weights.bound() == {}
    assert weights.addresses()["linear.weight"] == 0
    assert weights.fills_parameters


def test_a_forward_pass_computes_with_the_memory_that_was_bound_last(memory: Memory) -> None:
    model = lazy_decoder()
    weights = ModelWeights(model, 0, 1)
    first, second = (make_views(mapping, weights, seed) for seed, mapping in enumerate(memory))
    answers = []
    for views in (first, second, second, first):
        prepared = weights.prepare(views)
        weights.bind(views)
        del prepared
        assert weights.bound() == views
        weights.verify_bound()
        answers.append(answer(model))
    assert answers == [expected(views) for views in (first, second, second, first)]
    assert answers[0] != answers[1]
    first["linear.bias"].numpy()[...] = 77  # the very memory, not a copy of it
    assert answer(model) == expected(first) != answers[0]
    weights.unbind()


def test_addresses_are_those_of_the_views_except_where_a_parameter_is_filled(memory: Memory) -> None:
    weights = ModelWeights(Decoder(), 0, 1)
    own = weights.addresses()
    for seed, mapping in enumerate(memory):
        views = make_views(mapping, weights, seed)
        weights.bind(views)
        places = {name: view.mapping.address + view.offset for name, view in views.items()}
        addresses = weights.addresses()
        assert addresses["filled"] == own["filled"] != 0
        assert addresses["tied.weight"] == addresses["linear.weight"] == places["linear.weight"]
        assert addresses["norm"] == places["norm"]
        assert addresses["scale"] == places["scale"]
    weights.unbind()


def test_what_is_unbound_holds_no_memory_and_can_be_bound_again(memory: Memory) -> None:
    model = lazy_decoder()
    weights = ModelWeights(model, 0, 1)
    views = make_views(memory[0], weights, 1)
    weights.bind(views)
    before = answer(model)
    weights.unbind()
    assert set(weights.addresses().values()) == {0}
    assert weights.bound() == {}
    assert memory[0].num_exports == 0
    weights.bind(views)
    weights.verify_bound()
    assert answer(model) == before
    assert model.filled.strides == [1, 4]
    weights.unbind()


def test_a_write_to_a_filled_parameter_is_found_and_mended_by_another_bind(memory: Memory) -> None:
    model = lazy_decoder()
    weights = ModelWeights(model, 0, 1)
    views = make_views(memory[0], weights, 1)
    weights.bind(views)
    before = answer(model)
    with paddle.no_grad():
        model.filled[3, 5] = float("nan")
    with pytest.raises(ChecksumMismatchError, match="rank 0: filled does not hold"):
        weights.verify_bound()
    weights.bind(views)
    weights.verify_bound()
    assert answer(model) == before
    weights.unbind()


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("missing", "linear.bias missing"),
        ("unknown", "spare unknown"),
        ("tied", "tied.bias unknown"),
        ("dtype", "linear.bias has dtype F32, not I32"),
        ("shape", r"linear.weight has shape \[4, 6\], not \[6, 4\]"),
    ],
)
def test_views_that_do_not_fit_are_refused_before_anything_is_touched(memory: Memory, fault: str, text: str) -> None:
    model = lazy_decoder()
    weights = ModelWeights(model, 0, 1)
    views = make_views(memory[0], weights, 1)
    weights.bind(views)
    before, addresses = answer(model), weights.addresses()
    wrong = make_views(memory[1], weights, 2)
    bias, weight = wrong["linear.bias"], wrong["linear.weight"]
    if fault == "missing":
        del wrong["linear.bias"]
    else:
        wrong |= {
            "unknown": {"spare": bias},
            "tied": {"tied.bias": bias},
            "dtype": {"linear.bias": TensorView(bias.mapping, bias.offset, "I32", bias.shape)},
            "shape": {"linear.weight": TensorView(weight.mapping, weight.offset, "F32", (6, 4))},
        }[fault]
    with pytest.raises(CoverageError, match=text):
        weights.bind(wrong)
    assert (answer(model), weights.addresses(), weights.bound()) == (before, addresses, views)
    weights.unbind()


@pytest.mark.parametrize("is_bound", [True, False], ids=["after another version", "as the first"])
def test_a_bind_that_fails_half_way_puts_back_what_was_bound(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, is_bound: bool
) -> None:
    """`filled` has been overwritten by then, and others have been rebound."""
    model = lazy_decoder()
    weights = ModelWeights(model, 0, 1)
    views = make_views(memory[0], weights, 1)
    if is_bound:
        weights.bind(views)
        before = answer(model)
    sources = model_weights._sources

    class Failing:
        def _share_buffer_to(self, target: paddle.Tensor) -> None:
            raise MemoryError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(model_weights, "_sources", lambda views: {**sources(views), "linear.weight": Failing()})
        with pytest.raises(MemoryError, match="no more"):
            weights.bind(make_views(memory[1], weights, 2))
    assert memory[1].num_exports == 0
    if is_bound:
        weights.verify_bound()
        assert (answer(model), weights.bound()) == (before, views)
    else:
        assert (set(weights.addresses().values()), weights.bound()) == ({0}, {})
    weights.bind(views)
    assert answer(model) == expected(views)
    weights.unbind()


def test_where_nothing_can_be_put_back_nothing_is_bound(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = ModelWeights(lazy_decoder(), 0, 1)
    views = make_views(memory[0], weights, 1)
    weights.bind(views)

    def failing(*_: object) -> None:
        raise MemoryError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(model_weights, "_fill", failing)
        with pytest.raises(MemoryError, match="no more"):
            weights.bind(make_views(memory[1], weights, 2))
    assert (set(weights.addresses().values()), weights.bound()) == ({0}, {})
    weights.bind(views)
    weights.verify_bound()
    weights.unbind()


def test_two_models_share_one_memory(memory: Memory) -> None:
    """Published once, as tied, or as equal bytes: both compute with it, and it can go when both have let go."""
    models = lazy_decoder(), lazy_decoder()
    both = [ModelWeights(model, 0, 1) for model in models]
    views = make_views(memory[0], both[0], 1)
    for weights in both:
        weights.bind(views)
    assert answer(models[0]) == answer(models[1]) == expected(views)
    both[0].unbind()
    assert answer(models[1]) == expected(views)
    assert memory[0].num_exports > 0
    both[1].unbind()
    assert memory[0].num_exports == 0


class Draft(paddle.nn.Layer):
    """As FastDeploy's MTP models: the embedding is the main model's own layer."""

    def __init__(self, main: Decoder) -> None:
        super().__init__()
        self.embedding = main.linear
        self.own = paddle.nn.Linear(6, 2)


def test_what_a_draft_model_has_of_the_main_one_is_tied_to_it_and_bound_by_it(memory: Memory) -> None:
    main = lazy_decoder()
    draft = Draft(main)
    shares = shared_parameters(draft, main)
    assert shares == {"embedding.weight": "linear.weight", "embedding.bias": "linear.bias"}
    weights, beside = ModelWeights(main, 0, 1), ModelWeights(draft, 0, 1, shares=shares)
    specs = {spec.name: _as_in_group(spec, "mtp", False) for spec in beside.specs}
    assert {name: (spec.coverage, spec.tied_to) for name, spec in specs.items()} == {
        "embedding.weight": (Coverage.TIED, "linear.weight"),
        "embedding.bias": (Coverage.TIED, "linear.bias"),
        "own.weight": (Coverage.UPDATED, None),
        "own.bias": (Coverage.UPDATED, None),
    }
    weights.bind(make_views(memory[0], weights, 1))
    beside.bind(make_views(memory[1], beside, 2))
    assert beside.addresses()["embedding.weight"] == weights.addresses()["linear.weight"]
    beside.unbind()
    assert weights.addresses()["linear.weight"] != 0
    weights.unbind()
    with pytest.raises(ConfigurationError, match="typo"):
        ModelWeights(draft, 0, 1, shares={"typo": "linear.weight"})


def test_parameters_that_a_user_calls_rank_local_have_room_for_each_rank(memory: Memory) -> None:
    model = lazy_decoder()
    weights = ModelWeights(model, 1, 2, rank_local=["sc*", "tied.bias"])
    shapes = {spec.name: (spec.shape, spec.shard_axis) for spec in weights.specs}
    assert shapes["scale"] == ((2,), 0)
    assert shapes["linear.bias"] == shapes["tied.bias"] == ((12,), 0)
    assert shapes["linear.weight"] == ((4, 6), None)
    views = make_views(memory[0], weights, 1)
    weights.bind(views)
    assert views["scale"].shape == (1,)
    assert answer(model) == expected({**views, "scale": TensorView(memory[0], views["scale"].offset, "F32", ())})
    weights.unbind()
    check_patterns(["sc*"], weights)
    with pytest.raises(ConfigurationError, match=r"rank_local.*'lora\*' fits no parameter"):
        check_patterns(["sc*", "lora*"], weights)


def test_a_dtype_that_cannot_be_published_is_refused_by_name() -> None:
    model = paddle.nn.Layer()
    model.register_buffer("phases", paddle.zeros([2], dtype="complex64"))
    with pytest.raises(ConfigurationError, match="phases has dtype"):
        ModelWeights(model, 0, 1)
