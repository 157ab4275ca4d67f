"""Two processes side by side, as the doctor compares them: on /proc trees of other machines."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_rl.cli.doctor import pid
from fastdeploy_rl.observe.doctor import fastdeploy, ipc
from fastdeploy_rl.observe.doctor.allocators import hindrances, judge_allocator
from fastdeploy_rl.observe.doctor.check import Check, Status
from fastdeploy_rl.observe.doctor.device_choice import (
    SETTINGS,
    choice_of,
    judge_choice,
    judge_same_devices,
    judge_same_names,
    names_a_device,
)
from fastdeploy_rl.observe.doctor.kernel import Kernel, parse_environ, parse_user
from fastdeploy_rl.observe.doctor.peers import Peer, Sight, sight_of
from fastdeploy_rl.observe.doctor.text import quoted

GPU = "GPU-11111111-aaaa-4aaa-8aaa-000000000001"
MIG = "MIG-33333333-dddd-4ddd-8ddd-000000000004"
NO_SIGNS = ipc.Meant(())
GPU_MEANT = ipc.Meant(("NVIDIA's driver is loaded",))


class FakeProcesses:
    """A /proc of some processes; those that were started alike stand in the same namespaces and mounts."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.kernel = Kernel(root)

    def start(self, process: str, *, container: str = "a", user: int = 1000, **environ: str) -> None:
        proc = self._root / "proc" / process
        (proc / "ns").mkdir(parents=True)
        (proc / "fd").mkdir()
        (self._root / container / "dev/shm").mkdir(parents=True, exist_ok=True)
        (proc / "root").symlink_to(self._root / container)
        for kind in ("pid", "ipc", "user"):
            (proc / "ns" / kind).symlink_to(f"{kind}:[{4026532000 + ord(container)}]")
        (proc / "status").write_text(
            f"Name:\tpython\nUid:\t{user}\t{user}\t{user}\t{user}\nCapEff:\t0000000000000000\n"
        )
        (proc / "cmdline").write_text("python\0train.py\0--api-key\0secret\0")
        (proc / "environ").write_text("".join(f"{name}={value}\0" for name, value in environ.items()))
        mount = f"25 24 0:23 / /dev/shm rw - tmpfs shm rw,size={ord(container)}k\n"
        (proc / "mountinfo").write_text(mount)

    def open_file(self, process: str, number: int, path: Path) -> None:
        (self._root / "proc" / process / "fd" / str(number)).symlink_to(path)


@pytest.fixture
def machine(tmp_path: Path) -> FakeProcesses:
    return FakeProcesses(tmp_path / "root")


def compare(machine: FakeProcesses, meant: ipc.Meant = NO_SIGNS, refusal: str = "") -> dict[str, Check]:
    checks = ipc.check_peer(machine.kernel, Peer("peer", 7), meant, take=lambda pid: refusal)
    return {check.name: check for check in checks}


# --- two processes -----------------------------------------------------------------------------------


def test_two_processes_of_one_container_have_everything_in_common(machine: FakeProcesses) -> None:
    machine.start("self")
    machine.start("7")
    checks = compare(machine, GPU_MEANT)
    assert {check.status for check in checks.values()} == {Status.OK}
    assert checks["process"].found == "python train.py"  # and not what follows: that may be a key


def test_two_containers_fail_with_the_options_that_join_them(machine: FakeProcesses) -> None:
    machine.start("self", container="a")
    machine.start("7", container="b")
    checks = compare(machine, GPU_MEANT)
    assert checks["PID namespace"].status is Status.FAIL
    assert "--pid=container:NAME" in checks["PID namespace"].mend
    assert "shareProcessNamespace" in checks["PID namespace"].mend
    assert checks["IPC namespace"].status is Status.WARN
    assert checks["user namespace"].status is Status.WARN
    shm = checks["/dev/shm"]
    assert (shm.status, "size=98k" in shm.found) == (Status.FAIL, True)
    assert "--ipc=container:NAME" in shm.mend
    assert "medium: Memory" in shm.mend


def test_pid_namespaces_matter_to_cuda_only(machine: FakeProcesses) -> None:
    machine.start("self", container="a")
    machine.start("7", container="b")
    assert compare(machine, NO_SIGNS)["PID namespace"].status is Status.WARN


def test_another_user_is_a_failure(machine: FakeProcesses) -> None:
    machine.start("self", user=1000)
    machine.start("7", user=0)
    check = compare(machine)["user"]
    assert check.status is Status.FAIL
    assert "1000 here, 0 there" in check.found


def test_a_descriptor_that_may_not_be_taken_matters_where_a_gpu_is_meant(machine: FakeProcesses) -> None:
    machine.start("self")
    machine.start("7")
    refusal = "pidfd_getfd: Operation not permitted"
    assert compare(machine, NO_SIGNS, refusal)["descriptors"].status is Status.OK
    check = compare(machine, GPU_MEANT, refusal)["descriptors"]
    assert check.status is Status.WARN
    assert "--cap-add=SYS_PTRACE" in check.mend


def test_allocators_of_the_other_side_are_judged_by_its_environment(machine: FakeProcesses) -> None:
    machine.start("self")
    machine.start("7", FLAGS_use_virtual_memory_auto_growth="true")
    check = compare(machine, GPU_MEANT)["allocator"]
    assert check.status is Status.FAIL
    assert check.mend.startswith("FLAGS_use_virtual_memory_auto_growth=0")


def test_different_gpus_are_a_failure_also_without_a_driver(machine: FakeProcesses) -> None:
    machine.start("self", CUDA_VISIBLE_DEVICES=GPU)
    machine.start("7", CUDA_VISIBLE_DEVICES=MIG)
    assert compare(machine)["same devices"].status is Status.FAIL


# --- who is seen -------------------------------------------------------------------------------------


def test_a_named_process_that_is_not_here_fails_and_nothing_else_is_asked(machine: FakeProcesses) -> None:
    machine.start("self")
    checks = ipc.check_peer(machine.kernel, Peer("peer", 7), NO_SIGNS, take=lambda pid: pytest.fail("was asked"))
    assert [(check.name, check.status) for check in checks] == [("process", Status.FAIL)]
    assert "--pid=" in checks[0].mend


def test_a_pid_that_belongs_to_another_process_here_is_not_the_peer(machine: FakeProcesses, tmp_path: Path) -> None:
    machine.start("7")
    lock, other = tmp_path / "root" / "lock", tmp_path / "root" / "other"
    for path in (lock, other):
        path.touch()
    machine.open_file("7", 3, other)
    peer = Peer("publisher", 7, Path("/lock"))
    assert sight_of(machine.kernel, peer) is Sight.ABSENT
    assert ipc.judge_absence(peer, True).status is Status.FAIL
    assert ipc.judge_absence(peer, False).status is Status.WARN
    machine.open_file("7", 4, lock)
    assert sight_of(machine.kernel, peer) is Sight.OPEN


def test_a_process_that_cannot_be_looked_into_is_no_silent_success(machine: FakeProcesses) -> None:
    machine.start("self")
    machine.start("7", user=0)
    for link in (machine.kernel._at("/proc/7/ns")).iterdir():
        link.unlink()
    assert sight_of(machine.kernel, Peer("peer", 7)) is Sight.CLOSED
    (check,) = ipc.check_peer(machine.kernel, Peer("peer", 7), NO_SIGNS, take=lambda pid: "")
    assert (check.status, "nothing was compared" in check.found) == (Status.FAIL, True)
    assert "of user 0" in check.found


def test_an_owner_without_a_pid_is_absent(machine: FakeProcesses) -> None:
    assert sight_of(machine.kernel, Peer("publisher", None, Path("/lock"))) is Sight.ABSENT


def test_a_mount_that_cannot_be_seen_is_a_warning() -> None:
    assert ipc.judge_shared_shm(None, None, None).status is Status.WARN
    assert ipc.judge_pid_namespaces(None, None, True).status is Status.FAIL


# --- is a GPU meant ----------------------------------------------------------------------------------


def test_a_gpu_is_meant_where_a_side_names_one_or_the_driver_is_loaded(machine: FakeProcesses) -> None:
    machine.start("self")
    machine.start("7", CUDA_VISIBLE_DEVICES="0")
    machine.start("8", NVIDIA_VISIBLE_DEVICES="all")
    assert not ipc.find_signs(machine.kernel, [])
    assert not ipc.find_signs(machine.kernel, [Peer("peer", 8), Peer("peer", 9)])
    assert ipc.find_signs(machine.kernel, [Peer("rank 0", 7)]).signs == ("rank 0 (pid 7) has CUDA_VISIBLE_DEVICES=0",)
    driver = machine.kernel._at("/proc/driver/nvidia")
    driver.mkdir(parents=True)
    (driver / "version").touch()
    assert ipc.find_signs(machine.kernel, []).signs == ("NVIDIA's driver is loaded",)
    machine.kernel._at("/proc/self/environ").write_text("CUDA_VISIBLE_DEVICES=\0")
    assert not ipc.find_signs(machine.kernel, [])


def test_no_driver_is_a_failure_where_a_gpu_is_meant_and_told_where_none_is() -> None:
    failed = ipc.judge_no_driver("no CUDA driver", GPU_MEANT)
    assert failed.status is Status.FAIL
    assert "NVIDIA's driver is loaded" in failed.found
    told = ipc.judge_no_driver("no CUDA driver", NO_SIGNS)
    assert (told.status, told.found) == (Status.WARN, "not tried: no CUDA driver")


# --- allocators --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "mend"),
    [
        ("FLAGS_use_cuda_malloc_async_allocator", "1", "FLAGS_use_cuda_malloc_async_allocator=0"),
        ("FLAGS_use_virtual_memory_auto_growth", "True", "FLAGS_use_virtual_memory_auto_growth=0"),
        ("FLAGS_use_vmm_auto_growth_best_fit_allocator_v2", "1", "FLAGS_use_vmm_auto_growth_best_fit_allocator_v2=0"),
        ("FLAGS_use_cuda_managed_memory", "true", "FLAGS_use_cuda_managed_memory=0"),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, expandable_segments:True", "expandable_segments:False"),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True", "expandable_segments:False"),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync", "backend:native"),
    ],
)
def test_settings_that_leave_no_handle_fail_with_what_to_set(name: str, value: str, mend: str) -> None:
    check = judge_allocator({name: value, "PATH": "/bin"}, True)
    assert check.status is Status.FAIL
    assert name in check.found
    assert mend in check.mend
    assert judge_allocator({name: value}, False).status is Status.WARN


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FLAGS_use_virtual_memory_auto_growth", "0"),
        ("FLAGS_use_cuda_malloc_async_allocator", "false"),
        ("FLAGS_use_auto_growth_v2", "1"),
        ("FLAGS_allocator_strategy", "naive_best_fit"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False,backend:native"),
        ("PYTORCH_CUDA_ALLOC_CONF", ",:,expandable_segments"),
    ],
)
def test_other_settings_are_in_nobodys_way(name: str, value: str) -> None:
    assert hindrances({name: value}) == []
    assert judge_allocator({name: value}, True).status is Status.OK


# --- devices -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": "4,5, 6"}, ("4", "5", "6")),
        ({"CUDA_VISIBLE_DEVICES": "4,5", "FLAGS_selected_gpus": "1"}, ("5",)),
        ({"CUDA_VISIBLE_DEVICES": f"{GPU},{MIG}", "FLAGS_selected_gpus": "1"}, (MIG,)),
        ({"FLAGS_selected_gpus": "3"}, ("3",)),
        ({"CUDA_VISIBLE_DEVICES": ""}, ()),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, ()),
    ],
)
def test_devices_are_what_both_settings_leave(environ: dict[str, str], names: tuple[str, ...] | None) -> None:
    choice = choice_of(environ)
    assert (choice.names, choice.problem) == (names, "")
    assert names_a_device(choice) is bool(names)


@pytest.mark.parametrize(
    ("environ", "word"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,gpu1"}, "no CUDA device is called"),
        ({"CUDA_VISIBLE_DEVICES": f"MIG-{GPU}/1/0"}, "old form"),
        ({"CUDA_VISIBLE_DEVICES": "0", "FLAGS_selected_gpus": "1"}, "takes number 1 of 1"),
        ({"FLAGS_selected_gpus": GPU}, "must be an ordinal"),
    ],
)
def test_settings_that_mean_nothing_fail_with_the_reason(environ: dict[str, str], word: str) -> None:
    check = judge_choice(choice_of(environ))
    assert check.status is Status.FAIL
    assert word in check.found


def test_sides_without_a_gpu_are_told() -> None:
    assert judge_choice(choice_of({"CUDA_VISIBLE_DEVICES": ""})).status is Status.WARN
    assert "--gpus all" in judge_choice(choice_of({"NVIDIA_VISIBLE_DEVICES": "void"})).mend
    assert judge_choice(choice_of({"NVIDIA_VISIBLE_DEVICES": "all"})).status is Status.OK


@pytest.mark.parametrize(
    ("own", "other", "status"),
    [
        ({}, {}, Status.OK),
        ({}, {"CUDA_VISIBLE_DEVICES": "1"}, Status.WARN),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "1"}, Status.OK),
        ({"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}, Status.FAIL),
        ({"CUDA_VISIBLE_DEVICES": "3"}, {"FLAGS_selected_gpus": "3"}, Status.OK),
        ({"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": GPU}, Status.WARN),
        ({"CUDA_VISIBLE_DEVICES": "GPU-11111111"}, {"CUDA_VISIBLE_DEVICES": GPU.upper()}, Status.OK),
        ({"CUDA_VISIBLE_DEVICES": GPU}, {"CUDA_VISIBLE_DEVICES": MIG}, Status.FAIL),
        ({"CUDA_VISIBLE_DEVICES": "0", "NVIDIA_VISIBLE_DEVICES": "2"}, {"CUDA_VISIBLE_DEVICES": "0"}, Status.WARN),
        ({"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": ""}, Status.OK),
        ({"CUDA_VISIBLE_DEVICES": ""}, {}, Status.WARN),
        ({"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "0"}, Status.FAIL),
        ({"CUDA_VISIBLE_DEVICES": "?"}, {}, Status.WARN),
    ],
)
def test_names_are_compared_as_far_as_names_can_be(own: dict[str, str], other: dict[str, str], status: Status) -> None:
    assert judge_same_names(choice_of(own), choice_of(other)).status is status


def test_with_a_driver_uuids_decide() -> None:
    assert judge_same_devices([GPU], [GPU]).status is Status.OK
    assert "one side only" in judge_same_devices([GPU, MIG], [GPU]).found
    check = judge_same_devices([GPU], [MIG])
    assert check.status is Status.FAIL
    assert "by UUID" in check.mend
    assert choice_of({"CUDA_VISIBLE_DEVICES": "5,6", "FLAGS_selected_gpus": "1"}).taken([GPU, MIG]) == [MIG]


# --- texts -------------------------------------------------------------------------------------------


def test_environments_and_users_are_parsed_and_odd_ones_do_no_harm() -> None:
    assert parse_environ("A=1\0B=x=y\0A=2\0odd\0") == {"A": "1", "B": "x=y"}
    assert parse_environ("") == {}
    assert parse_user("Name:\tx\nUid:\t1000\t7\t1000\t1000\n") == 7
    assert parse_user("Uid:\tnone\n") is None


def test_what_another_process_says_cannot_move_the_cursor() -> None:
    assert quoted("0\x1b[2J\n1") == "0?[2J?1"
    assert len(quoted("x" * 1000)) < 130


@pytest.mark.parametrize("text", ["0", "-1", "", "1.5", "٣", "9" * 11])
def test_what_is_no_process_id_is_refused(text: str) -> None:
    with pytest.raises(Exception, match="a process id is a whole number above 0"):
        pid(text)


@given(st.dictionaries(st.sampled_from([*SETTINGS, "PYTORCH_CUDA_ALLOC_CONF", "FD_PLUGINS"]), st.text()), st.text())
def test_whatever_stands_in_an_environment_is_judged_and_shown_on_one_line(
    environ: dict[str, str], arguments: str
) -> None:
    choice = choice_of(environ)
    checks = [judge_choice(choice), judge_same_names(choice, choice_of({})), judge_allocator(environ, True)]
    for check in checks:
        assert check.found.isprintable()
        assert check.mend or check.status is Status.OK
    problem = fastdeploy.why_not_selected([], environ.get("FD_PLUGINS"))
    assert problem.isprintable()
    assert all(name.startswith("--") for name in fastdeploy.parse_options(arguments.split("\0")))
