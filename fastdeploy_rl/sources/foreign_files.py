"""Which files that no SnapshotWriter wrote are a version of the weights, where there are no snapshots.

    1. FastDeploy's, in the model directory
    2. FastDeploy's, in the channel's directory (`--ipc-dir /shared_ipc_meta`)
    3. a Hugging Face checkpoint that is the channel's directory (`--ipc-dir CHECKPOINT`)
    4. a Hugging Face checkpoint that is the model directory, where a `version.yaml` or `version.txt` says which step it
       is

Owns this order. Refuses to know the formats. Invariant: the directory that an engine started from is no newer version
merely because it is there: somebody has to name it, or to number it.
"""

from functools import partial

from fastdeploy_rl.sources.base import SourceConfig
from fastdeploy_rl.sources.described import DescribedSource, FoundFiles
from fastdeploy_rl.sources.fastdeploy_files import find_fastdeploy
from fastdeploy_rl.sources.hugging_face_files import find_hugging_face
from fastdeploy_rl.sources.version_file import wanted_version


def create(config: SourceConfig) -> DescribedSource:
    """A source of such files; nothing is opened before it is used."""
    channel, model_dir = config.channel, config.model_dir
    places = f"{channel}: no snapshot is there (a trainer writes them with a SnapshotWriter, or fastdeploy-rl snapshot "
    places += "does), none of FastDeploy's files and no checkpoint"
    if model_dir is not None:
        places += f"; nor has {model_dir} any of FastDeploy's, or a checkpoint with a version.yaml"
    return DescribedSource(config, partial(find_foreign, config), places)


def find_foreign(config: SourceConfig) -> FoundFiles | None:
    """The first of these that is there; None: none is."""
    places = [directory for directory in (config.model_dir, config.channel) if directory is not None]
    found = next((each for each in (find_fastdeploy(place, config) for place in places) if each is not None), None)
    found = found or find_hugging_face(config.channel)
    if found is None and config.model_dir is not None and wanted_version(config.model_dir) is not None:
        found = find_hugging_face(config.model_dir)
    return found
