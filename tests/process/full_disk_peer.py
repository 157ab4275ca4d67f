"""A process whose /dev/shm has 3 MiB, for shared memory and snapshots both: the second version finds no room."""

from pathlib import Path

import numpy as np

from fastdeploy_rl.errors import NoSpaceError
from fastdeploy_rl.publish.publisher import WeightPublisher
from fastdeploy_rl.publish.snapshot_writer import SnapshotWriter

NUM_BYTES = 3 << 20


def main() -> None:
    channel = Path("/dev/shm/channel")
    with WeightPublisher(channel, max_arenas=2) as publisher, SnapshotWriter(channel) as snapshots:
        for step in (1, 2):
            snapshots.write(publisher.publish({"w": np.full(200_000, step, np.float32)}, step=step))
            try:
                snapshots.wait(30)
            except NoSpaceError as error:
                print(error)
        names = sorted(path.name.partition("-")[0] for path in (channel / "snapshots").iterdir())
        print(step, snapshots.latest.version if snapshots.latest else None, names)


if __name__ == "__main__":
    main()
