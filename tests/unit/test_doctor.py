"""The doctor's eyes: what the kernel's files mean, and how each finding is judged. Everything but real processes."""

from pathlib import Path

import pytest

from fastdeploy_rl.memory.cuda_devices import CudaDevice
from fastdeploy_rl.observe.doctor import gpu, machine
from fastdeploy_rl.observe.doctor.channel import judge_directory, judge_unclaimed
from fastdeploy_rl.observe.doctor.check import Check, Section, Status, fail, ok, warn, worst
from fastdeploy_rl.observe.doctor.examination import examine
from fastdeploy_rl.observe.doctor.kernel import (
    Kernel,
    MemoryLimit,
    Mount,
    container_of_cgroup,
    has_capability,
    parse_cgroups,
    parse_mounts,
    parse_namespace,
)
from fastdeploy_rl.observe.doctor.leftovers import Item
from fastdeploy_rl.observe.sizes import size_text
from fastdeploy_rl.publish.channel import Channel

SHM_LINE = "25 24 0:23 / /dev/shm rw,nosuid,relatime - tmpfs shm rw,size=65536k,huge=advise"
V2_LINE = "31 23 0:28 / /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw,nsdelegate"
V1_LINE = "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory"


class FakeMachine:
    """A root directory with the kernel's files of another machine."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def write(self, path: str, text: str) -> None:
        file = self._root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def link(self, path: str, target: str) -> None:
        file = self._root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.symlink_to(target)

    @property
    def kernel(self) -> Kernel:
        return Kernel(self._root)


@pytest.fixture
def fake(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path / "root")


def of_name(checks: list[Check], name: str) -> Check:
    (check,) = [check for check in checks if check.name == name]
    return check


# --- parsers ---------------------------------------------------------------------------------------


def test_a_mount_line_gives_point_kind_and_the_options_of_both_sides() -> None:
    (mount,) = parse_mounts(SHM_LINE + "\nno mount line\n\n")
    assert mount == Mount("/", "/dev/shm", "tmpfs", ("rw", "nosuid", "relatime", "rw", "size=65536k", "huge=advise"))
    assert (mount.option("size"), mount.option("huge"), mount.option("mode")) == ("65536k", "advise", None)


def test_spaces_in_mount_points_are_written_as_octal_numbers() -> None:
    (mount,) = parse_mounts(r"1 2 0:3 / /a\040b rw shared:1 - ext4 /dev/x\134y rw")
    assert (mount.point, mount.kind) == ("/a b", "ext4")


def test_the_last_mount_hides_those_below(fake: FakeMachine) -> None:
    fake.write("/proc/self/mountinfo", f"{SHM_LINE}\n30 25 0:27 / /dev/shm ro - tmpfs tmpfs ro,size=1k\n")
    mount = fake.kernel.mount_at("/dev/shm")
    assert mount is not None
    assert mount.option("size") == "1k"
    assert fake.kernel.mount_at("/nowhere") is None


def test_cgroup_lines_of_both_versions_are_read() -> None:
    assert parse_cgroups("9:name=systemd:/s\n4:memory,cpu:/box/1\n0::/v2\n") == {
        "name=systemd": "/s",
        "memory": "/box/1",
        "cpu": "/box/1",
        "": "/v2",
    }


@pytest.mark.parametrize(
    ("link", "number"),
    [("pid:[4026531836]", 4026531836), ("", None), ("pid:[x]", None), ("pid_for_children:[12]", 12), ("/proc/1", None)],
)
def test_namespace_links_hold_a_number(link: str, number: int | None) -> None:
    assert parse_namespace(link) == number


def test_capabilities_are_bits_of_a_hex_number() -> None:
    status = "Name:\tx\nCapPrm:\tffffffffffffffff\nCapEff:\t0000000000080000\n"
    assert has_capability(status, 19)
    assert not has_capability(status, 18)
    assert not has_capability("", 19)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("0::/kubepods/besteffort/pod1/2", "kubernetes"),
        ("1:cpu:/docker/abc", "docker"),
        ("0::/machine.slice/libpod-1.scope", "podman"),
        ("0::/init.scope", ""),
    ],
)
def test_group_names_give_containers_away(text: str, kind: str) -> None:
    assert container_of_cgroup(text) == kind


def test_files_in_the_root_give_containers_away(fake: FakeMachine) -> None:
    fake.write("/proc/1/cgroup", "0::/\n")
    assert fake.kernel.container() == ""
    fake.write("/.dockerenv", "")
    assert fake.kernel.container() == "docker"
    fake.write("/var/run/secrets/kubernetes.io/serviceaccount/token", "")
    assert fake.kernel.container() == "kubernetes"


def test_the_tightest_memory_limit_of_cgroup_v2_counts(fake: FakeMachine) -> None:
    fake.write("/proc/self/mountinfo", f"{V2_LINE}\n")
    fake.write("/proc/self/cgroup", "0::/outer/inner\n")
    fake.write("/sys/fs/cgroup/outer/inner/memory.max", "max\n")
    assert fake.kernel.memory_limit() is None
    fake.write("/sys/fs/cgroup/outer/memory.max", "4096000\n")
    fake.write("/sys/fs/cgroup/outer/memory.current", "1000\n")
    fake.write("/sys/fs/cgroup/memory.max", "9000000\n")
    assert fake.kernel.memory_limit() == MemoryLimit(4096000, 1000)


def test_the_memory_limit_of_cgroup_v1_is_found_from_inside_a_container(fake: FakeMachine) -> None:
    fake.write("/proc/self/mountinfo", f"{V1_LINE}\n")
    fake.write("/proc/self/cgroup", "4:memory:/docker/abc\n")
    fake.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", f"{0x7FFFFFFFFFFFF000}\n")
    assert fake.kernel.memory_limit() is None
    fake.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "512\n")
    fake.write("/sys/fs/cgroup/memory/memory.usage_in_bytes", "500\n")
    assert fake.kernel.memory_limit() == MemoryLimit(512, 500)


def test_a_machine_that_shows_nothing_is_read_as_empty(fake: FakeMachine) -> None:
    kernel = fake.kernel
    assert (kernel.read("/proc/meminfo"), kernel.link("/proc/self/ns/pid"), kernel.container()) == ("", "", "")
    assert (kernel.memory_limit(), kernel.available_bytes(), kernel.namespace("pid")) == (None, None, None)


# --- judgement -------------------------------------------------------------------------------------


def test_a_tiny_shm_fails_a_small_one_warns_and_both_name_the_containers_option() -> None:
    tiny, small = machine.judge_shm_size(65536, 4096), machine.judge_shm_size(64 << 20, 64 << 20)
    assert (tiny.status, small.status) == (Status.FAIL, Status.WARN)
    assert "--shm-size" in tiny.mend
    assert "--shm-size" in small.mend
    assert machine.judge_shm_size(32 << 30, 31 << 30) == ok("size", "34.4 GB, 33.3 GB free")


def test_shm_that_is_no_tmpfs_or_read_only_is_found() -> None:
    disk, read_only = Mount("/", "/dev/shm", "ext4", ("rw",)), Mount("/", "/dev/shm", "tmpfs", ("ro",))
    assert machine.judge_shm_kind(None).status is Status.WARN
    assert "ext4" in machine.judge_shm_kind(disk).found
    assert machine.judge_shm_rights(True, read_only).status is Status.FAIL
    assert machine.judge_shm_rights(False, disk).status is Status.FAIL
    assert machine.judge_shm_rights(True, disk).status is Status.OK


def test_huge_pages_are_told_not_judged() -> None:
    (mount,) = parse_mounts(SHM_LINE)
    check = machine.describe_huge_pages(mount, "always within_size advise [never] deny force")
    assert check == ok("huge pages", "mount option huge=advise, system never")
    assert machine.describe_huge_pages(None, "").status is Status.OK


def test_memory_is_short_where_either_the_machine_or_the_container_has_little() -> None:
    plenty = 64 << 30
    assert machine.judge_memory(plenty, None).status is Status.OK
    assert machine.judge_memory(None, None).status is Status.OK
    assert machine.judge_memory(1 << 20, None).status is Status.WARN
    check = machine.judge_memory(plenty, MemoryLimit(2 << 30, 2 << 30))
    assert check.status is Status.WARN
    assert "shared memory included" in check.found


def test_limits_matter_more_with_a_gpu(fake: FakeMachine) -> None:
    assert machine.judge_memlock(8 << 20, False).status is Status.OK
    assert machine.judge_memlock(8 << 20, True).status is Status.WARN
    assert machine.judge_memlock(-1, True) == ok("locked memory", "unlimited")
    few = machine.judge_open_files(256, 4096)
    assert few.status is Status.WARN
    assert "ulimit -n" in few.mend
    assert machine.judge_open_files(1024, 4096).status is Status.OK
    assert not machine.has_gpu(fake.kernel)


def test_namespaces_of_a_container_come_with_the_option_that_joins_them() -> None:
    assert machine.judge_ipc_namespace(4026531839, "docker").mend == ""
    assert machine.judge_ipc_namespace(4026532100, "").mend == ""
    own = machine.judge_ipc_namespace(4026532100, "docker")
    assert (own.status, own.mend.startswith("if ")) == (Status.OK, True)
    assert "--ipc=host" in own.mend
    assert machine.judge_pid_namespace(4026532101, False).mend == ""
    assert "--pid=" in machine.judge_pid_namespace(4026532101, True).mend
    assert machine.describe_namespace("user", 5, 6) == "its own (5), not that of process 1 (6)"
    assert machine.describe_namespace("user", None, 6).startswith("unknown")


def test_descriptors_out_of_reach_matter_to_cuda_only() -> None:
    no_rights = "CapEff:\t0000000000000000\n"
    assert machine.judge_reach("", no_rights, True).status is Status.OK
    assert machine.judge_reach("1\n", "CapEff:\t0000000000080000\n", True).status is Status.OK
    assert machine.judge_reach("1\n", no_rights, False).status is Status.OK
    blocked = machine.judge_reach("1\n", no_rights, True)
    assert blocked.status is Status.WARN
    assert "pidfd_getfd" in blocked.found
    assert "--cap-add=SYS_PTRACE" in blocked.mend


def test_a_machine_without_a_gpu_is_fine_and_a_container_without_its_gpu_is_not(fake: FakeMachine) -> None:
    assert gpu.judge_absence("no CUDA driver", fake.kernel, None) == ok("devices", "none: CPU only")
    assert gpu.judge_absence("no CUDA driver", fake.kernel, "").status is Status.OK
    assert "unset CUDA_VISIBLE_DEVICES" in gpu.judge_absence("no CUDA driver", fake.kernel, "0").mend
    fake.write("/proc/driver/nvidia/version", "NVRM version: 550\n")
    assert "--gpus all" in gpu.judge_absence("no CUDA driver", fake.kernel, None).mend
    fake.write("/dev/nvidiactl", "")
    assert "NVIDIA_DRIVER_CAPABILITIES" in gpu.judge_absence("no CUDA driver", fake.kernel, None).mend


def test_each_entry_of_cuda_visible_devices_is_explained() -> None:
    devices = [CudaDevice(0, "GPU-11111111-aaaa-4aaa-8aaa-000000000001", "Fake A100")]
    assert gpu.judge_selection(None, devices).status is Status.OK
    assert gpu.judge_selection("GPU-11111111", devices).status is Status.OK
    check = gpu.judge_selection("0,MIG-7", devices)
    assert check.status is Status.WARN
    assert "0: GPU-11111111" in check.found
    assert "MIG-7: names no device" in check.found


def test_packages_are_compared_by_their_numbers() -> None:
    needed = machine.needed_versions(["numpy>=1.26", 'paddlepaddle>=3.3; extra == "cpu"', "odd"])
    assert needed == {"numpy": "1.26", "paddlepaddle": "3.3"}
    lines = ["numpy>=1.26", 'httpx>=0.27; extra == "engine"', "rich>=13; extra == 'engine'"]
    assert [machine.of_extra(lines, extra) for extra in ("", "engine", "ray")] == [lines[:1], lines[1:], []]
    assert machine.judge_package("numpy", "1.26.4", "1.26", is_core=True).status is Status.OK
    assert machine.judge_package("numpy", "1.9", "1.26", is_core=True) == fail(
        "numpy", "1.9; 1.26 or later is needed", "pip install 'numpy>=1.26'"
    )
    assert machine.judge_package("numpy", "", "1.26", is_core=True).status is Status.FAIL
    assert machine.judge_package("uvicorn", "", "0.30", is_core=False).status is Status.OK


def test_a_machine_without_paddle_is_fine_and_two_paddles_are_not() -> None:
    needed = {"paddlepaddle": "3.3"}
    none = machine.judge_paddle({}, needed)
    assert (none.status, none.mend.startswith("if ")) == (Status.OK, True)
    assert machine.judge_paddle({"paddlepaddle": "3.3.1"}, needed).status is Status.OK
    assert machine.judge_paddle({"paddlepaddle": "2.6.0"}, needed).status is Status.FAIL
    both = machine.judge_paddle({"paddlepaddle": "3.3.1", "paddlepaddle-gpu": "3.3.1.post126"}, needed)
    assert both.status is Status.FAIL


def test_a_channel_that_is_open_to_others_or_a_file_is_a_failure_with_its_mend(tmp_path: Path) -> None:
    path = tmp_path / "channel"
    assert judge_directory(Channel(path)).status is Status.OK
    path.mkdir(mode=0o700)
    assert judge_directory(Channel(path)).found == f"nothing was published at {path} yet"
    path.chmod(0o755)
    check = judge_directory(Channel(path))
    assert check.status is Status.FAIL
    assert f"chmod 700 {path}" in check.mend
    file = tmp_path / "file"
    file.touch(mode=0o600)
    assert judge_directory(Channel(file)).status is Status.FAIL


def test_what_no_lock_speaks_for_is_only_a_problem_where_nobody_has_it_mapped() -> None:
    names = (
        "fastdeploy_rl.0.abc.1.0.0.x",
        "fastdeploy_rl.0.def.1.0.0.y",
        "fastdeploy_rl.0.def.1.0.1.z",
        "fastdeploy_rl_a.7",
    )
    used, *unused = (Item(Path("/dev/shm") / name, 4096) for name in names)
    assert judge_unclaimed([], {}) == []
    first, second = judge_unclaimed([used, *unused], {used.path: [12]} | {item.path: [] for item in unused})
    assert (first.status, second.status) == (Status.OK, Status.WARN)
    assert "pid 12" in first.found
    assert second.mend.endswith("rm /dev/shm/fastdeploy_rl.0.def.* /dev/shm/fastdeploy_rl_a.7")


def test_the_worst_check_counts() -> None:
    assert worst([]) is Status.OK
    assert worst([Section("a", [ok("x", "")]), Section("b", [warn("y", "", "do")])]) is Status.WARN
    assert worst([Section("a", [fail("x", "", "do"), ok("y", "")])]) is Status.FAIL


def test_sizes_read_as_people_say_them() -> None:
    assert [size_text(size) for size in (64, 4096, 64 << 20, 31_300_000_000)] == [
        "64 bytes",
        "4.1 KB",
        "67.1 MB",
        "31.3 GB",
    ]


def test_every_problem_of_a_bare_machine_comes_with_a_mend(fake: FakeMachine, tmp_path: Path) -> None:
    """A root without a single file: nothing is known, and nothing breaks."""
    examination = examine(tmp_path / "channel", kernel=fake.kernel)
    checks = [check for section in examination.sections for check in section.checks]
    assert [check for check in checks if check.status is not Status.OK and not check.mend] == []
    assert of_name(checks, "mount").status is Status.WARN
    assert not (tmp_path / "channel").exists()
