"""CUDA memory from one process to another, tried out: `python -m fastdeploy_rl.observe.doctor.cuda_probe VERB ...`.

Owns the question and its child processes: contexts, which take memory on the device, are made in children that end, and
a driver that hangs hangs there. Invariant: every child is waited for with a deadline, and nothing is left behind.
Tested on FakeCuda; not run on a GPU.
"""

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from fastdeploy_rl.config import Deadlines, child_environ
from fastdeploy_rl.errors import CudaError, FastDeployRLError
from fastdeploy_rl.memory.cuda_devices import visible_devices
from fastdeploy_rl.memory.cuda_ipc import CudaExporter, CudaImports, CudaRecord
from fastdeploy_rl.observe.doctor.device_choice import SETTINGS

_PROBE_BYTES = 1 << 16
_MAX_ANSWER_BYTES = 1 << 20


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a child found: `devices` by UUID, the SHA-256 of what was `read`; or why not."""

    devices: list[str] = []
    read: str = ""
    error: str = ""


def list_devices(settings: Mapping[str, str]) -> list[str]:
    """UUIDs of the devices that a process here would see with these of SETTINGS, in the driver's order. CudaError with
    the reason where there is none."""
    return _checked(_run("list", environ=_environ_with(settings), deadline_s=Deadlines.probe_s)).devices


def share_memory(settings: Mapping[str, str], ordinal: int) -> str:
    """Exports memory of one device in a child and opens it in another, which reads the bytes; the device's UUID.
    CudaError with the reason where that fails."""
    with tempfile.TemporaryDirectory(prefix="fastdeploy_rl_probe-") as directory:
        environ = _environ_with(settings)
        answer = _run("share", directory, str(ordinal), environ=environ, deadline_s=Deadlines.probe_s)
    return _checked(answer).devices[0]


def _environ_with(settings: Mapping[str, str]) -> dict[str, str]:
    """This process's environment, with those of SETTINGS that are given and none of the others."""
    return {name: value for name, value in child_environ({}).items() if name not in SETTINGS} | dict(settings)


def _run(*arguments: str, environ: Mapping[str, str] | None, deadline_s: float, text: bytes = b"") -> Answer:
    command = [sys.executable, "-m", "fastdeploy_rl.observe.doctor.cuda_probe", *arguments]
    pipe = subprocess.PIPE
    leads = environ is not None
    # A group of its own for the child that we start, and for the one that it starts: they are ended together.
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environ, start_new_session=leads) as child:
        try:
            out, errors = child.communicate(text, timeout=deadline_s)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL) if leads else child.kill()
            child.communicate(timeout=Deadlines.terminate_s)
            return Answer(error=f"no answer from the driver within {deadline_s:.0f} s")
    try:
        return msgspec.json.decode(out[-_MAX_ANSWER_BYTES:], type=Answer)
    except msgspec.DecodeError:
        said = errors.decode(errors="replace").strip().splitlines()[-1:]
        return Answer(error=f"the child process ended with {child.returncode}: {''.join(said)[:300]}")


def _checked(answer: Answer) -> Answer:
    if answer.error or not answer.devices:
        raise CudaError(answer.error or "the driver lists no device")
    return answer


# --- in the child ----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    verb, *rest = arguments
    verbs: dict[str, Callable[..., Answer]] = {"list": _list, "share": _share, "open": _open}
    try:
        answer = verbs[verb](*rest)
    except (FastDeployRLError, OSError) as error:
        answer = Answer(error=str(error))
    sys.stdout.write(msgspec.json.encode(answer).decode())
    return 0


def _list() -> Answer:
    return Answer(devices=[device.uuid for device in visible_devices()])


def _share(directory: str, device: str) -> Answer:
    """The exporter; its own child is the importer."""
    data = os.urandom(_PROBE_BYTES)
    with CudaExporter(Path(directory), device) as exporter:
        allocation = exporter.allocate(len(data))
        allocation.write(data)
        record = allocation.record(0, len(data))
        # Shorter than our own deadline, so that nobody outlives it.
        answer = _run("open", directory, environ=None, deadline_s=Deadlines.probe_s / 2, text=record.to_json())
        allocation.free()
    if not answer.error and answer.read != hashlib.sha256(data).hexdigest():
        return Answer(error=f"another process reads other bytes from memory of {record.device}")
    return Answer(devices=[record.device], error=answer.error)


def _open(directory: str) -> Answer:
    record = CudaRecord.from_json(sys.stdin.buffer.read(_MAX_ANSWER_BYTES))
    data = bytearray(record.num_bytes)
    with CudaImports(Path(directory), record.device) as imports, imports.open(record) as memory:
        memory.read(data)
    return Answer(devices=[record.device], read=hashlib.sha256(data).hexdigest())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
