"""The other side of `real_tree.RealPeer`: imports FastDeploy, then calls what each line of standard input names.

The one thing that this machine lacks at import are FastDeploy's compiled operators: a module function takes their place
that gives an operator which refuses to run. What else a case has to fake, it fakes itself."""

import importlib
import json
import os
import sys
import traceback
from multiprocessing import resource_tracker
from typing import Any


def _missing_operator(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def operator(*arguments: object, **more: object) -> None:
        raise RuntimeError(f"FastDeploy's operator {name} is not compiled here")

    return operator


def _answer(line: str) -> dict[str, Any]:
    request = json.loads(line)
    module, _, function = request["function"].rpartition(".")
    try:
        return {"returned": getattr(importlib.import_module(module), function)(**request["arguments"])}
    except Exception:
        return {"raised": traceback.format_exc()}


def main() -> None:
    # First, so that it is there when tests look: what starts it later would seem to have left it behind.
    resource_tracker.ensure_running()
    # Libraries print; answers have a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import fastdeploy.model_executor.ops.gpu as operators

    operators.__getattr__ = _missing_operator
    import fastdeploy.worker.worker_process

    print(json.dumps({"returned": fastdeploy.__file__}), file=answers)
    for line in sys.stdin:
        print(json.dumps(_answer(line)), file=answers)


if __name__ == "__main__":
    main()
