"""Memory that was given back, filled with NaN: whatever still reads it makes itself heard.

An arena when it is released; the KV cache's pages, when all of them are forgotten, are windowed_worker.py's. What is
unmapped needs none: reading it is the end of the process.
"""

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.memory.arena import ArenaPair
from fastdeploy_rl.memory.tensor_view import TensorView

ALL_ONES = 0xFF
"""Four or two of them are a NaN."""


class PoisonedArenas(ArenaPair):
    """As its parent, but nothing is left in what comes back. `num_poisoned`: how often that was."""

    num_poisoned = 0

    def release(self, mapping: Mapping) -> None:
        super().release(mapping)
        TensorView(mapping, 0, "U8", (mapping.num_bytes,)).numpy()[:] = ALL_ONES
        self.num_poisoned += 1
