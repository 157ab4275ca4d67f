"""The parameters of one Paddle model, as the weight manager sees them.

Owns where each parameter's bytes lie. Those on a CPU, laid out as C arrays are, lie in the views that they are bound
to: nothing is copied. Those on a device, and those with strides of their own, are *filled*: the view's bytes are copied
into them, and their address stays. Refuses to know requests, caches, graphs and how weights arrive. Invariant: when a
call has returned or raised, the parameters are all bound to what was given together, or to what they were bound to
before, or to nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np
import paddle

from fastdeploy_rl.coverage import Coverage, ParameterSpec
from fastdeploy_rl.engines.fastdeploy.parameter_cut import cut, marks_of, rank_local
from fastdeploy_rl.errors import ChecksumMismatchError, ConfigurationError, CoverageError
from fastdeploy_rl.memory import paddle_view
from fastdeploy_rl.memory.tensor_view import TensorView
from fastdeploy_rl.plan.namespaces import absolute

RANK_LOCAL_OPTION = '{"fastdeploy_rl": {"rank_local": ["PATTERN", ...]}} of --rsync-config'
_MAX_NAMED = 5
_DTYPES = {
    paddle.float64: "F64",
    paddle.float32: "F32",
    paddle.float16: "F16",
    paddle.bfloat16: "BF16",
    paddle.float8_e4m3fn: "F8_E4M3",
    paddle.float8_e5m2: "F8_E5M2",
    paddle.int64: "I64",
    paddle.int32: "I32",
    paddle.int16: "I16",
    paddle.int8: "I8",
    paddle.uint8: "U8",
    paddle.bool: "BOOL",
}


class _Parameter(NamedTuple):
    """`tensors`: the Paddle tensors that stand for it, more than one where several were made over the same memory.
    `shape`, `strides`: of what this rank holds, in elements."""

    name: str
    tensors: tuple[paddle.Tensor, ...]
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_filled: bool


class ModelWeights:
    """Everything in `model.state_dict()`, persistable buffers too, as FastDeploy's own manager takes it. All calls come
    from one thread, but for `prepare`."""

    def __init__(
        self,
        model: paddle.nn.Layer,
        rank: int,
        num_ranks: int,
        *,
        rank_local: Sequence[str] = (),
        shares: Mapping[str, str] | None = None,
    ) -> None:
        """`rank_local`: patterns (`*`, `?`) of names of which each rank has its own; case matters. `shares`: parameters
        that are another model's, which binds them: the name here -> the name there, as the group of both knows it.

        ConfigurationError: a name in `shares` that no parameter has, a dtype that no publication can bring."""
        self.rank, self.num_ranks = rank, num_ranks
        state = model.state_dict()
        shares = shares or {}
        _check_shares(state, shares)
        groups = _tied_groups({name: tensor for name, tensor in state.items() if name not in shares})
        self._parameters = tuple(_parameter(names, state) for names in groups)
        self._specs = _specs(model, state, groups, rank_local, shares, num_ranks)
        self._tensors_by_name = state
        self._bound: dict[str, TensorView] = {}
        self._held: dict[str, paddle.Tensor] = {}

    @property
    def specs(self) -> tuple[ParameterSpec, ...]:
        """Every name of the state dict, in its order; constant."""
        return self._specs

    @property
    def fills_parameters(self) -> bool:
        """As `ModelRunner.fills_parameters`."""
        return any(parameter.is_filled for parameter in self._parameters)

    def bound(self) -> dict[str, TensorView]:
        """As `ModelRunner.bound`."""
        return dict(self._bound)

    def addresses(self) -> Mapping[str, int]:
        """Where each parameter lies now, those of other models and tied names included; 0: nowhere."""
        return {name: _address(tensor) for name, tensor in self._tensors_by_name.items()}

    def prepare(self, views: Mapping[str, TensorView]) -> object:
        """What `bind` of these takes longest to make; for the caller to keep until then. From any thread."""
        return _sources(views)

    def bind(self, views: Mapping[str, TensorView]) -> None:
        """CoverageError, before anything is touched, unless `views` are one for each updated parameter, of its shape
        and dtype. Whatever is raised later on, parameters are bound to what they were bound to before; to nothing,
        where that was nothing."""
        self._check_views(views)
        held = _sources(views)
        try:
            self._place(held)
        except BaseException:  # and no ExitStack: its frames would keep the tensors until garbage is collected
            self._put_back()
            raise
        self._bound, self._held = dict(views), held

    def unbind(self) -> None:
        """Lets go of every parameter's memory, also of what no `bind` gave it."""
        for parameter in self._parameters:
            for tensor in parameter.tensors:
                tensor._clear_data()
        self._bound, self._held = {}, {}

    def verify_bound(self) -> None:
        """ChecksumMismatchError, naming it, where a filled parameter's bytes are not those of its view."""
        for parameter in self._parameters:
            view = self._bound.get(parameter.name)
            if view is not None and parameter.is_filled and not _has_bytes_of(parameter, view):
                raise ChecksumMismatchError(
                    f"rank {self.rank}: {parameter.name} does not hold what was copied into it: something else "
                    "writes to it"
                )

    def _check_views(self, views: Mapping[str, TensorView]) -> None:
        expected = {parameter.name: parameter for parameter in self._parameters}
        problems = [
            f"{name} missing" if name in expected else f"{name} unknown" for name in expected.keys() ^ views.keys()
        ]
        for name in expected.keys() & views.keys():
            view, parameter = views[name], expected[name]
            if view.dtype != parameter.dtype:
                problems.append(f"{name} has dtype {parameter.dtype}, not {view.dtype}")
            elif (view.shape or (1,)) != (parameter.shape or (1,)):
                problems.append(f"{name} has shape {list(parameter.shape)}, not {list(view.shape)}")
        if problems:
            more = f" and {len(problems) - _MAX_NAMED} more" if len(problems) > _MAX_NAMED else ""
            raise CoverageError(
                f"rank {self.rank}: what is to be bound does not fit this model: "
                f"{', '.join(sorted(problems)[:_MAX_NAMED])}{more}"
            )

    def _place(self, held: Mapping[str, paddle.Tensor]) -> None:
        for parameter in self._parameters:
            if parameter.is_filled:
                _fill(parameter, held[parameter.name])
            elif parameter.name in held:
                for tensor in parameter.tensors:
                    held[parameter.name]._share_buffer_to(tensor)

    def _put_back(self) -> None:
        if not self._bound:
            self.unbind()
            return
        try:
            self._place(self._held)
        except BaseException:
            self.unbind()
            raise


def shared_parameters(model: paddle.nn.Layer, other: paddle.nn.Layer) -> dict[str, str]:
    """For `shares`: what `model` has of `other`, as an MTP model that uses the main model's embedding does; the same
    Parameter, not one that looks like it."""
    names = {id(tensor): name for name, tensor in reversed(other.state_dict().items())}
    return {name: names[id(tensor)] for name, tensor in model.state_dict().items() if id(tensor) in names}


def check_patterns(rank_local: Sequence[str], *models: ModelWeights) -> None:
    """ConfigurationError for a pattern that fits no parameter of any of the models."""
    names = [spec.name for model in models for spec in model.specs]
    for pattern in rank_local:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigurationError(f"{RANK_LOCAL_OPTION}: {pattern!r} fits no parameter")


# --- what the model has ------------------------------------------------------------------------------------


def _check_shares(state: Mapping[str, Any], shares: Mapping[str, str]) -> None:
    unknown = sorted(shares.keys() - state.keys())
    if unknown:
        raise ConfigurationError(f"{unknown[:_MAX_NAMED]} are shared with another model, but no parameters of this one")


def _tied_groups(state: Mapping[str, paddle.Tensor]) -> list[list[str]]:
    """Names of one memory, in the order of the state dict."""
    groups: dict[object, list[str]] = {}
    for name, tensor in state.items():
        groups.setdefault(_place_of(tensor), []).append(name)
    return list(groups.values())


def _place_of(tensor: paddle.Tensor) -> object:
    if not tensor._is_initialized() or not tensor.size:
        return id(tensor)
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.strides), tensor.dtype


def _parameter(names: Sequence[str], state: Mapping[str, paddle.Tensor]) -> _Parameter:
    tensor = state[names[0]]
    shape, strides = tuple(tensor.shape), tuple(tensor.strides)
    distinct = {id(state[name]): state[name] for name in names}
    is_filled = 0 not in shape and not (_is_on_host(tensor) and tensor.is_contiguous())
    return _Parameter(names[0], tuple(distinct.values()), _dtype_name(names[0], tensor), shape, strides, is_filled)


def _is_on_host(tensor: paddle.Tensor) -> bool:
    """Where it is, or where it would be allocated."""
    place = tensor.place if tensor._is_initialized() else paddle.framework._current_expected_place()
    return bool(place.is_cpu_place()) if hasattr(place, "is_cpu_place") else isinstance(place, paddle.CPUPlace)


def _dtype_name(name: str, tensor: paddle.Tensor) -> str:
    try:
        return _DTYPES[tensor.dtype]
    except KeyError:
        raise ConfigurationError(f"{name} has dtype {tensor.dtype}, of which no update can bring new values") from None


def _specs(
    model: paddle.nn.Layer,
    state: Mapping[str, paddle.Tensor],
    groups: Sequence[Sequence[str]],
    patterns: Sequence[str],
    shares: Mapping[str, str],
    num_ranks: int,
) -> tuple[ParameterSpec, ...]:
    holders, num_cuts = _holders(model), _num_cuts(model, num_ranks)
    firsts = {name: group[0] for group in groups for name in group}
    own = {group[0] for group in groups if any(fnmatchcase(name, pattern) for name in group for pattern in patterns)}

    def spec(name: str) -> ParameterSpec:
        tensor = state[firsts.get(name, name)]
        dtype, shape = _dtype_name(name, tensor), tuple(tensor.shape)
        if num_ranks > 1 and firsts.get(name) in own:
            return rank_local(name, dtype, shape, num_ranks)
        return cut(name, dtype, shape, marks_of(tensor, *holders.get(id(tensor), (model, name)), num_cuts), num_ranks)

    return tuple(_tied(spec(name), firsts, shares) for name in state)


def _num_cuts(model: paddle.nn.Layer, num_ranks: int) -> int:
    """Ranks of the tensor-parallel group: under expert parallelism, not all of the engine's."""
    parallel = getattr(getattr(model, "fd_config", None), "parallel_config", None)
    return int(getattr(parallel, "tensor_parallel_size", num_ranks))


def _tied(spec: ParameterSpec, firsts: Mapping[str, str], shares: Mapping[str, str]) -> ParameterSpec:
    if spec.name in shares:
        return replace(spec, coverage=Coverage.TIED, tied_to=absolute(shares[spec.name]))
    first = firsts[spec.name]
    return spec if first == spec.name else replace(spec, coverage=Coverage.TIED, tied_to=first)


def _holders(model: paddle.nn.Layer) -> dict[int, tuple[paddle.nn.Layer, str]]:
    """The layer that holds a tensor, and what it calls it; the innermost one, which made it."""
    found: dict[int, tuple[paddle.nn.Layer, str]] = {}
    for _, layer in model.named_sublayers(include_self=True):
        for attribute, tensor in (*layer._parameters.items(), *layer._buffers.items()):
            found[id(tensor)] = layer, attribute
    return found


# --- where its bytes are ----------------------------------------------------------------------------------


def _sources(views: Mapping[str, TensorView]) -> dict[str, paddle.Tensor]:
    """Without those of no bytes: to Paddle's mind they are not contiguous, and one that lies where another tensor
    begins would keep that one's memory for good."""
    return {name: paddle_view.tensor(view) for name, view in views.items() if view.num_bytes}


def _address(tensor: paddle.Tensor) -> int:
    return int(tensor.data_ptr()) if tensor._is_initialized() else 0


def _fill(parameter: _Parameter, source: paddle.Tensor) -> None:
    target = parameter.tensors[0]
    if not target._is_initialized():
        _allocate(parameter)
    if not (target.is_contiguous() or target.place.is_cpu_place()):
        source = source._copy_to(target.place, True)  # Paddle copies from host to device in one run
    with paddle.no_grad():
        target.copy_(source.reshape(target.shape), True)


def _allocate(parameter: _Parameter) -> None:
    """Memory with the strides that the parameter has, where Paddle puts new tensors: a flat tensor's becomes its own,
    shape and strides stay."""
    target = parameter.tensors[0]
    reach = 1 + sum((n - 1) * stride for n, stride in zip(parameter.shape, parameter.strides, strict=True))
    memory = paddle.empty([max(reach, 1)], dtype=target.dtype)
    for tensor in parameter.tensors:
        memory._share_buffer_to(tensor)


def _has_bytes_of(parameter: _Parameter, view: TensorView) -> bool:
    words = np.uint64 if view.num_bytes % 8 == 0 else np.uint8
    held = np.ascontiguousarray(parameter.tensors[0].numpy()).reshape(-1).view(words)
    return bool(np.array_equal(held, view.numpy().reshape(-1).view(words)))
