"""An engine over fake workers as a process, told by one JSON argument; says what happens in JSON lines."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from fastdeploy_rl.board.board import Leftovers
from fastdeploy_rl.config import Deadlines, api_keys
from fastdeploy_rl.engines.embedded.messages import Ready
from fastdeploy_rl.engines.embedded.supervisor import CheckedModel, ServeConfig, StartVersion, serve
from fastdeploy_rl.errors import FastDeployRLError


class LineAnnouncer:
    def starting(self, config: ServeConfig, model: CheckedModel, reclaimed: Leftovers | None) -> None:
        say(event="starting", max_model_len=model.max_model_len)

    def ready(self, ranks: Sequence[Ready], seconds: float, start: StartVersion) -> None:
        say(event="ready", weight_bytes=[rank.weight_bytes for rank in ranks])

    def rank_lost(self, rank: int, reason: str) -> None:
        say(event="rank_lost", rank=rank, reason=reason)

    def rank_back(self, ready: Ready) -> None:
        say(event="rank_back", rank=ready.rank)


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def main() -> int:
    settings = json.loads(sys.argv[1])
    config = ServeConfig(
        model_dir=Path(settings["model_dir"]),
        num_ranks=settings["num_ranks"],
        channel=Path(settings["channel"]),
        port=settings["port"],
        board_port=settings["board_port"],
        log_dir=Path(settings["log_dir"]),
        worker_module="fake_worker",
        on_worker_death=settings.get("on_worker_death", "restart"),
        api_keys=api_keys(),
    )
    config = dataclasses.replace(config, deadlines=Deadlines(stop_s=settings.get("stop_s", 10.0)))
    try:
        serve(config, LineAnnouncer())
    except FastDeployRLError as error:
        say(event="error", kind=type(error).__name__, message=str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
