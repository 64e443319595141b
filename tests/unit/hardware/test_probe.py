"""What the probe reports of GPUs and cores."""

import os

import pytest

from shardwise.hardware import Gpu, probe_gpus, usable_cores
from shardwise.hardware.probe import cgroup_quota, select_visible

UUIDS = ("GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3")


@pytest.mark.parametrize(
    ("visible", "chosen"),
    [
        (None, (0, 1, 2)),
        ((), ()),
        (("2", "0"), (2, 0)),
        (("GPU-cccc-3", "0"), (2, 0)),
        (("GPU-aab",), (1,)),
        (("0", "7", "1"), (0,)),
        (("GPU-aa", "2"), ()),
        (("MIG-1",), ()),
    ],
    ids=["all", "none", "indices", "uuid", "prefix", "beyond", "ambiguous", "mig"],
)
def test_visible_devices_are_chosen_as_cuda_chooses_them(visible, chosen):
    assert select_visible(UUIDS, visible) == chosen


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), False), ((8, 0), True), ((10, 0), True)])
def test_bf16_comes_with_ampere(capability, expected):
    assert Gpu(index=0, name="x", memory_bytes=1, compute_capability=capability).has_bf16 is expected


@pytest.mark.gpu
def test_hidden_gpus_are_not_probed(monkeypatch):
    assert probe_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert probe_gpus() == ()


@pytest.mark.gpu
def test_the_probe_agrees_with_cuda():
    import torch

    properties = torch.cuda.get_device_properties(0)
    gpus = probe_gpus()
    assert len(gpus) == torch.cuda.device_count()
    assert gpus[0].name == properties.name
    assert gpus[0].compute_capability == (properties.major, properties.minor)
    assert 0.9 < gpus[0].memory_bytes / properties.total_memory < 1.1


def test_usable_cores_stay_within_the_affinity():
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_the_smallest_quota_on_the_way_up_counts_in_cgroup_2(tmp_path):
    write(tmp_path / "a" / "b", cpu__max="max 100000")
    write(tmp_path / "a", cpu__max="150000 100000")
    write(tmp_path, cpu__max="400000 100000")
    assert cgroup_quota(tmp_path, "0::/a/b\n") == 1.5


def test_the_quota_of_cgroup_1_counts(tmp_path):
    write(tmp_path / "cpu,cpuacct" / "job", cpu__cfs_quota_us="200000", cpu__cfs_period_us="100000")
    assert cgroup_quota(tmp_path, "4:memory:/x\n2:cpu,cpuacct:/job\n") == 2.0


def test_a_container_that_sees_the_path_of_its_host_uses_its_own_root(tmp_path):
    write(tmp_path / "cpu", cpu__cfs_quota_us="300000", cpu__cfs_period_us="100000")
    assert cgroup_quota(tmp_path, "2:cpu:/docker/0123\n") == 3.0


def test_no_quota_is_none(tmp_path):
    write(tmp_path / "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert cgroup_quota(tmp_path, "2:cpu:/\n0::/\n") is None
