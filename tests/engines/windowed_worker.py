"""The engine's own worker with a window: whoever connects is told where the bound parameters lie.

So a test can read, or flip, their bytes from outside, and need not believe what the engine says about itself. The
window is the abstract socket $WINDOW.RANK; the answer is JSON: name -> [address, bytes]. With $POISON, memory that the
engine gave back is NaN (poison.py).
"""

import math
import os
import socket
import sys
import threading
import warnings

import msgspec

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from fastdeploy_rl.engines.embedded import rank, worker

from poison import PoisonedArenas

from fastdeploy_rl import manager


class WindowedRunner(rank.EmbeddedRunner):
    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)
        window = socket.create_server(f"\0{os.environ['WINDOW']}.{self.rank}", family=socket.AF_UNIX)
        threading.Thread(target=self._answer, args=(window,), name="window", daemon=True).start()

    def _answer(self, window: socket.socket) -> None:
        while True:
            visitor, _ = window.accept()
            with visitor:
                visitor.sendall(self._places())

    def _places(self) -> bytes:
        return msgspec.json.encode(
            {name: (view.mapping.address + view.offset, view.num_bytes) for name, view in self.bound().items()}
        )


class PoisonedRunner(WindowedRunner):
    def rebuild_kv_cache(self, content_digest: str) -> None:
        if self._cache.num_bytes:
            for layer in self._cache.layers:
                layer.slots[:] = math.nan
        super().rebuild_kv_cache(content_digest)


if __name__ == "__main__":
    rank.EmbeddedRunner = PoisonedRunner if os.environ.get("POISON") else WindowedRunner
    if os.environ.get("POISON"):
        manager.ArenaPair = PoisonedArenas
    sys.exit(worker.main())
