"""What FastDeploy's engine and its workers say to each other about control methods."""

from typing import Any


class ControlRequest:
    def __init__(self, request_id: str, method: str, args: dict[str, Any] | None = None) -> None:
        self.request_id = request_id
        self.method = method
        self.args = args or {}

    def to_dict(self) -> dict[str, Any]:
        return {"request_id": self.request_id, "method": self.method, "args": self.args}

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> "ControlRequest":
        return cls(d["request_id"], d["method"], d.get("args", {}))


class ControlResponse:
    def __init__(
        self,
        request_id: str,
        error_code: int = 200,
        error_message: str | None = None,
        result: Any | None = None,
        finished: bool = True,
    ) -> None:
        self.request_id = request_id
        self.error_code = error_code
        self.error_message = error_message
        self.result = result
        self.finished = finished

    def to_dict(self) -> dict[str, Any]:
        return vars(self)

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> "ControlResponse":
        return cls(**d)
