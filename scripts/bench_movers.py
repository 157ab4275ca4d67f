"""What others do to move the benchmark's weights into a process: the peers that our load strategies are measured
beside. Each is written out here and runs without the package, as processes of its own:

    python scripts/bench_movers.py socket        one connection, `recv_into` one buffer; no names, no checksums
    python scripts/bench_movers.py fastdeploy    FastDeploy's rsync: paddle.save to bytes, one connection, tobytes,
                                                 BytesIO, paddle.load, set_value
    python scripts/bench_movers.py gloo          torch.distributed.broadcast, each way of it that is in use
    python scripts/bench_movers.py pdparams DIR  paddle.load of a file that it leaves in DIR, set_value

It prints its ways to do that, as a JSON list; then for each line of input, which names one, it moves everything once
and prints the seconds from asking for the weights until they stand in their places. Parameters are there and were
written before, as in an engine that has served; what a way needs beyond them it takes for itself."""

import io
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from bench_shapes import num_bytes, shapes

CONNECT_S = 60.0
END_S = 30.0
_LENGTH_BYTES = 8
_MIB = 1 << 20
BUCKETS = tuple(size * _MIB for size in (64, 256, 1024))
Ways = dict[str, Callable[[], object]]


class Ends(NamedTuple):
    """Both ends of one connection; the receiver asks with one byte, the number of a way, before it is called."""

    receiver: Callable[[socket.socket], Ways]
    sender: Callable[[socket.socket], Ways]


def main() -> None:
    name, *rest = sys.argv[1:]
    if name == "pdparams":
        _obey(_pdparams(Path(rest[0])), lambda way: None)
    elif rest:
        with socket.create_connection(("127.0.0.1", int(rest[0])), CONNECT_S) as connection:
            _send_when_asked(ENDS[name], connection)
    else:
        with _sender(name) as connection:
            _obey(ENDS[name].receiver(connection), lambda way: connection.sendall(bytes([way])))


@contextmanager
def _sender(name: str) -> Iterator[socket.socket]:
    """Connected to a child that sends; closing the connection ends it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(CONNECT_S)
        child = subprocess.Popen([sys.executable, __file__, name, str(server.getsockname()[1])])
        try:
            with server.accept()[0] as connection:
                yield connection
            child.wait(END_S)
        finally:
            child.kill()
            child.wait(END_S)


def _send_when_asked(ends: Ends, connection: socket.socket) -> None:
    connection.settimeout(None)  # it waits for as long as its parent lives
    ways = list(ends.sender(connection).values())
    while way := connection.recv(1):
        ways[way[0]]()


def _obey(ways: Ways, ask: Callable[[int], None]) -> None:
    print(json.dumps(list(ways)), flush=True)
    for line in sys.stdin:
        name = line.strip()
        started = time.perf_counter()
        ask(list(ways).index(name))
        ways[name]()
        print(json.dumps(time.perf_counter() - started), flush=True)


# --- a bare socket ---------------------------------------------------------------------------------


def _receive_bare(connection: socket.socket) -> Ways:
    buffer = memoryview(np.ones(sum(num_bytes().values()), np.uint8))
    return {"recv_into": lambda: _receive_into(connection, buffer)}


def _send_bare(connection: socket.socket) -> Ways:
    buffer = memoryview(np.ones(sum(num_bytes().values()), np.uint8))
    return {"sendall": lambda: connection.sendall(buffer)}


def _receive_into(connection: socket.socket, buffer: memoryview) -> None:
    while buffer:
        count = connection.recv_into(buffer)
        if count == 0:
            raise ConnectionError("the sender is gone")
        buffer = buffer[count:]


# --- FastDeploy's rsync ----------------------------------------------------------------------------


def _receive_saved(connection: socket.socket) -> Ways:
    import paddle

    parameters = _state_dict(0)

    def update() -> None:
        data_bytes = _receive_array(connection).tobytes()
        _set_all(parameters, paddle.load(io.BytesIO(data_bytes)))

    return {"paddle.load": update}


def _send_saved(connection: socket.socket) -> Ways:
    """A trainer that saves its state dict when it is asked for weights."""
    import paddle

    state_dict = _state_dict(1)

    def save() -> None:
        saved = io.BytesIO()
        paddle.save(state_dict, saved)
        connection.sendall(saved.tell().to_bytes(_LENGTH_BYTES, "little"))
        connection.sendall(saved.getbuffer())

    return {"paddle.save": save}


def _receive_array(connection: socket.socket) -> np.ndarray:
    length = bytearray(_LENGTH_BYTES)
    _receive_into(connection, memoryview(length))
    array = np.empty(int.from_bytes(length, "little"), np.uint8)
    _receive_into(connection, memoryview(array))
    return array


def _state_dict(seed: int) -> dict[str, Any]:
    """BF16 tensors; Paddle takes numpy's uint16 for their bits."""
    import paddle

    generator = np.random.default_rng(seed)
    return {name: paddle.to_tensor(generator.integers(0, 2**16, shape, np.uint16)) for name, shape in shapes().items()}


def _set_all(parameters: dict[str, Any], state_dict: dict[str, Any]) -> None:
    """FastDeploy's check, then its copy."""
    for name, parameter in parameters.items():
        if parameter.shape != state_dict[name].shape or parameter.dtype != state_dict[name].dtype:
            raise ValueError(f"{name} does not fit")
    for name, parameter in parameters.items():
        parameter.set_value(state_dict[name])


# --- paddle.load of a file -------------------------------------------------------------------------


def _pdparams(directory: Path) -> Ways:
    import paddle

    path = str(directory / "model_state.pdparams")
    paddle.save(_state_dict(1), path)
    parameters = _state_dict(0)
    return {"paddle.load": lambda: _set_all(parameters, paddle.load(path))}


# --- torch's gloo ----------------------------------------------------------------------------------


def _receive_gloo(connection: socket.socket) -> Ways:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    connection.sendall(store.port.to_bytes(_LENGTH_BYTES, "little"))
    dist.init_process_group("gloo", store=store, rank=1, world_size=2)
    return _broadcasts(is_sender=False)


def _send_gloo(connection: socket.socket) -> Ways:
    import torch.distributed as dist

    port = bytearray(_LENGTH_BYTES)
    _receive_into(connection, memoryview(port))
    store = dist.TCPStore("127.0.0.1", int.from_bytes(port, "little"), 2, False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=2)
    return _broadcasts(is_sender=True)


def _broadcasts(is_sender: bool) -> Ways:
    """Rank 0 sends. Each way works on the same tensors, as bytes."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)  # its copies wait for each other where both ends have a thread for each of two cores
    tensors = [torch.ones(size, dtype=torch.uint8) for size in num_bytes().values()]

    def at_once() -> None:
        for work in [dist.broadcast(tensor, 0, async_op=True) for tensor in tensors]:
            work.wait()

    def in_buckets(bucket: torch.Tensor, pieces: Sequence[Sequence[torch.Tensor]]) -> None:
        for group in pieces:
            sizes = [piece.numel() for piece in group]
            places = bucket[: sum(sizes)].split(sizes)
            if is_sender:
                _copy_all(group, places)
            dist.broadcast(bucket[: sum(sizes)], 0)
            if not is_sender:
                _copy_all(places, group)

    ways: Ways = {"layer by layer": lambda: [dist.broadcast(tensor, 0) for tensor in tensors], "async": at_once}
    for size in BUCKETS:
        bucket, pieces = torch.ones(size, dtype=torch.uint8), _groups(tensors, size)
        ways[f"buckets of {size // _MIB} MiB"] = lambda bucket=bucket, pieces=pieces: in_buckets(bucket, pieces)
    return ways


def _copy_all(sources: Sequence[Any], targets: Sequence[Any]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def _groups(tensors: Sequence[Any], bucket_bytes: int) -> list[list[Any]]:
    """Pieces of tensors that fill a bucket each; a tensor larger than the room that is left is cut."""
    groups: list[list[Any]] = [[]]
    room = bucket_bytes
    for tensor in tensors:
        while len(tensor):
            groups[-1].append(tensor[:room])
            room, tensor = room - len(groups[-1][-1]), tensor[room:]
            if room == 0:
                groups.append([])
                room = bucket_bytes
    return [group for group in groups if group]


ENDS = {
    "socket": Ends(_receive_bare, _send_bare),
    "fastdeploy": Ends(_receive_saved, _send_saved),
    "gloo": Ends(_receive_gloo, _send_gloo),
}

if __name__ == "__main__":
    main()
