"""FastDeploy's engine as its V1 routes see it: control methods that end here or go on to every worker.

Without a scheduler: nothing is preempted by a pause, new requests are held back by whoever asks `is_paused`."""

from collections.abc import Callable
from typing import Any, Protocol

from tests.engines.fastdeploy.standin import envs
from tests.engines.fastdeploy.standin.control import ControlRequest, ControlResponse

_TAGS = ("weight", "kv_cache")


class Workers(Protocol):
    def put_tasks(self, task: dict[str, Any]) -> None: ...

    def responses(self, request_id: str, timeout_s: float) -> list[ControlResponse]: ...


class EngineService:
    def __init__(self, workers: Workers, timeout_s: float) -> None:
        """`timeout_s`: for what FastDeploy gives 60 to 300 s."""
        self.is_paused = False
        self.version = ""
        self._workers = workers
        self._timeout_s = timeout_s

    def run_control_method(self, control_req: ControlRequest) -> ControlResponse:
        handler: Callable[[ControlRequest], Any] | None = getattr(self, f"_control_{control_req.method}", None)
        if handler is None:
            return ControlResponse(control_req.request_id, 400, f"unknown control method:{control_req.method}")
        try:
            return ControlResponse(control_req.request_id, 200, "Success", handler(control_req))
        except Exception as error:
            message = f"Failed to run control method {control_req.method}: {control_req.request_id} {error}"
            return ControlResponse(control_req.request_id, 500, message)

    def _control_pause(self, control_request: ControlRequest | None):
        if not envs.ENABLE_V1_KVCACHE_SCHEDULER:
            raise RuntimeError("pause only supported in ENABLE_V1_KVCACHE_SCHEDULER")
        self.is_paused = True

    def _control_resume(self, control_request: ControlRequest | None) -> None:
        self.is_paused = False

    def _control_is_paused(self, control_request: ControlRequest) -> dict[str, bool]:
        return {"is_paused": self.is_paused}

    def _control_update_weights(self, control_request: ControlRequest) -> list[Any]:
        if not self.is_paused:
            raise RuntimeError("Pause LLM Engine first before calling updating weights")
        responses = self._call_worker(control_request, self._timeout_s)
        versions = [result["version"] for result in responses if isinstance(result, dict) and "version" in result]
        self.version = versions[0] if versions else self.version
        return responses

    def _control_sleep(self, control_request: ControlRequest) -> list[Any]:
        control_request.args["tags"] = self._parse_tags(control_request)
        self._control_pause(None)
        return self._call_worker(control_request, self._timeout_s)

    def _control_wakeup(self, control_request: ControlRequest) -> list[Any]:
        """What no worker could do leaves the engine paused."""
        control_request.args["tags"] = self._parse_tags(control_request)
        result = self._call_worker(control_request, self._timeout_s)
        self._control_resume(None)
        return result

    def _parse_tags(self, control_request: ControlRequest) -> str:
        tags = control_request.args.get("tags")
        text = ",".join(_TAGS) if tags is None else ",".join(tags) if isinstance(tags, list) else tags
        for tag in text.split(","):
            if tag not in _TAGS:
                raise ValueError(f"Unsupported tag [{tag}] in [{text}], expected one of {list(_TAGS)}")
        return text

    def _call_worker(self, control_request: ControlRequest, timeout: float) -> list[Any]:
        self._workers.put_tasks(control_request.to_dict())
        results = []
        for rank, response in enumerate(self._workers.responses(control_request.request_id, timeout)):
            if response.error_code != 200:
                raise RuntimeError(f"Error response from ctrl_w2e_rank{rank}: {response.error_message}")
            results.append(response.result)
        return results
