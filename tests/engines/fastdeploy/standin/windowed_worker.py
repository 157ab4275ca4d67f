"""The stand-in's GpuWorker with a window for tests: methods that look at the runner, called as control methods are."""

from typing import Any

from tests.engines.fastdeploy.standin.gpu_worker import GpuWorker, ModelRunner


class WindowedWorker(GpuWorker):
    def dump(self) -> dict[str, str]:
        """The bytes of each parameter that is there, in hex."""
        runner = self.model_runner
        held = dict(runner.model.state_dict())
        if getattr(runner, "proposer", None) is not None:
            held |= {f"mtp/{name}": value for name, value in runner.proposer.model.state_dict().items()}
        return {name: value.numpy().tobytes().hex() for name, value in held.items() if value._is_initialized()}

    def runner_class(self) -> list[str]:
        return [f"{kind.__module__}.{kind.__qualname__}" for kind in ModelRunner.__mro__]

    def look(self, names: list[str]) -> dict[str, Any]:
        """Attributes of the runner by their names."""
        return {name: getattr(self.model_runner, name) for name in names}
