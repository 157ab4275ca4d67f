"""Which files that no SnapshotWriter wrote are a version of the weights, where there are no snapshots.

    1. FastDeploy's, in the model directory
    2. FastDeploy's, in the channel's directory (`--ipc-dir /shared_ipc_meta`), then in the one that trainers share
    3. a Hugging Face checkpoint that is the channel's directory (`--ipc-dir CHECKPOINT`)
    4. a Hugging Face checkpoint that is the model directory, where a `version.yaml` or `version.txt` says which step it
       is

Owns this order. Refuses to know the formats. Invariant: the directory that an engine started from is no newer version
merely because it is there: somebody has to name it, or to number it.
"""

from fastdeploy_rl.sources.base import SourceConfig
from fastdeploy_rl.sources.described import DescribedSource
from fastdeploy_rl.sources.describing import FoundFiles
from fastdeploy_rl.sources.fastdeploy_files import find_fastdeploy
from fastdeploy_rl.sources.hugging_face_files import find_hugging_face
from fastdeploy_rl.sources.version_file import wanted_version


def create(config: SourceConfig) -> DescribedSource:
    """A source of such files; nothing is opened before it is used."""
    places = (
        f"{config.channel}: no snapshot is there (a trainer writes them with a SnapshotWriter, or fastdeploy-rl "
        "snapshot does), none of FastDeploy's files and no checkpoint"
    )
    if config.model_dir is not None:
        places += f"; nor has {config.model_dir} any of FastDeploy's, or a checkpoint with a version.yaml"
    if config.metas_dir is not None:
        places += f"; nor has {config.metas_dir}"
    return DescribedSource(config, lambda _: find_foreign(config), places)


def find_foreign(config: SourceConfig) -> FoundFiles | None:
    """The first of these that is there; None: none is."""
    model_dir, channel = config.model_dir, config.channel
    shared = [directory for directory in (model_dir, channel, config.metas_dir) if directory is not None]
    found = next(filter(None, (find_fastdeploy(directory, config) for directory in shared)), None)
    found = found or find_hugging_face(channel)
    if found is None and model_dir is not None and wanted_version(model_dir) is not None:
        found = find_hugging_face(model_dir)
    return found
