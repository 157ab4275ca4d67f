"""A tensor view as a Paddle tensor over the same bytes.

Owns the one way memory of ours becomes Paddle's. Knows nothing of models. Invariant: no byte is copied, and the mapping
lives as long as the tensor.
"""

import threading
import weakref
from typing import Any, TypeAlias

import numpy.typing as npt
import paddle
from paddle.base import core

from fastdeploy_rl.memory.tensor_view import TensorView

_Place: TypeAlias = tuple[int, tuple[int, ...], str]
# Of the process, as what makes it necessary is Paddle's: it keeps one deleter for an address, so that of two tensors
# over the same bytes one would never let go of the mapping.
_tensors: weakref.WeakValueDictionary[_Place, paddle.Tensor] = weakref.WeakValueDictionary()
_making = threading.Lock()  # staging prepares tensors while the engine's loop may bind others


def tensor(view: TensorView) -> paddle.Tensor:
    """Zero-copy; from any thread; reads and writes go to the view's memory. A view
    of a mapping without write permission must not be written.

    One for each place, whoever asks: parameters that were published as one memory share it, also those of two models.
    Views of one address that differ in shape or dtype must not be asked for at a time."""
    place = (view.mapping.address + view.offset, view.shape, view.dtype)
    with _making:
        found = _tensors.get(place)
        if found is None:
            found = _tensors[place] = _tensor(view)
        return found


def _tensor(view: TensorView) -> paddle.Tensor:
    # What paddle.utils.dlpack.from_dlpack does, less its checks: a model has hundreds of parameters, and they are
    # rebound while the engine stands still.
    return paddle.Tensor(core.from_dlpack(view.mapping.dlpack(view.offset, view.shape, view.dtype)))


def array_tensor(array: npt.NDArray[Any]) -> paddle.Tensor:
    """Zero-copy over a writable C-contiguous array, which lives as long as the tensor (paddle.to_tensor copies, and
    takes ten times as long for a few numbers)."""
    return paddle.Tensor(core.from_dlpack(array.__dlpack__()))
