"""The HTTP face of an engine: OpenAI's routes, FastDeploy's control routes, and the weights.

Owns the application and the routes of the engine itself; the others stand with their families. Refuses to know
processes and boards: both come in behind Protocols. Invariant: whatever fails answers in OpenAI's error form with the
code of its class in errors.py (FastDeploy's V1 routes in FastDeploy's); a 429 or 503 carries Retry-After and the
reason; where there are API keys, all but /health and /metrics answers 401 without one (api_key.py).

    GET  /health                     200 while it serves, else 503 with the reason
    GET  /metrics                    Prometheus
    completion_routes.py             OpenAI's
    weight_routes.py                 /v1/weights and FastDeploy's two legacy routes
    v1_routes.py                     FastDeploy's V1 control routes
    GET  /openapi.json, /docs        all of them (api_page.py)
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import FastAPI, Response
from starlette.exceptions import HTTPException

from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.control.api_key import ApiKeyGuard
from fastdeploy_rl.control.api_page import ApiRoutes, add_page_routes
from fastdeploy_rl.control.completion_routes import add_completion_routes
from fastdeploy_rl.control.completions import CompletionService
from fastdeploy_rl.control.http_messages import answer_error, answer_http_error, json_answer
from fastdeploy_rl.control.metrics import CONTENT_TYPE, EngineMetrics
from fastdeploy_rl.control.v1_routes import add_v1_routes
from fastdeploy_rl.control.weight_routes import add_weight_routes
from fastdeploy_rl.control.weights_service import WeightsService
from fastdeploy_rl.errors import FastDeployRLError


@dataclass(frozen=True)
class EngineFace:
    """What the routes stand on."""

    completions: CompletionService
    weights: WeightsService
    metrics: EngineMetrics


def make_app(face: EngineFace, api_keys: Sequence[str] = (), deadlines: Deadlines | None = None) -> FastAPI:
    """The application; starts nothing and owns nothing of `face`. Without `api_keys` every client is served."""
    app = FastAPI(title="fastdeploy_rl", openapi_url=None, docs_url=None, redoc_url=None)
    deadlines = deadlines or Deadlines()
    app.state.deadlines = deadlines  # for `read_body`, which has nothing but the request
    if api_keys:
        app.add_middleware(ApiKeyGuard, keys=api_keys)
    app.add_exception_handler(FastDeployRLError, answer_error)
    app.add_exception_handler(HTTPException, answer_http_error)
    app.add_exception_handler(Exception, answer_error)
    routes = ApiRoutes(app)
    _add_engine_routes(routes, face)
    add_completion_routes(routes, face.completions, face.weights)
    add_weight_routes(routes, face.weights, deadlines)
    add_v1_routes(routes, face.weights, deadlines)
    add_page_routes(routes, wants_key=bool(api_keys))
    return app


def _add_engine_routes(routes: ApiRoutes, face: EngineFace) -> None:
    @routes.get("/health", "whether it serves", codes=(200, 503))
    async def health() -> Response:
        await face.weights.check_serving()
        face.completions.engine.check_admitting()
        return json_answer({"status": "serving"})

    @routes.get("/metrics", "Prometheus' text format")
    async def metrics() -> Response:
        for report in await face.weights.new_reports():
            face.metrics.observe_report(report)
        page = face.metrics.render(await face.weights.status(), face.completions.engine.load)
        return Response(page, media_type=CONTENT_TYPE)
