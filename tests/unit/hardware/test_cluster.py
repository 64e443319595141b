"""How a cluster is named, and which names are refused."""

import pytest

from refusals import refuses
from shardwise.hardware import Gpu, cluster
from shardwise.hardware.cluster import parse_cluster, this_machine
from shardwise.units import GIB


@pytest.fixture(autouse=True)
def no_user_file(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("text", "device", "nodes", "per_node"),
    [
        ("H100", "H100", 1, 1),
        ("8xH100", "H100", 1, 8),
        ("4xh100", "H100", 1, 4),
        ("1024xH100", "H100", 128, 8),
        ("16384xH100", "H100", 2048, 8),
        ("16,384xH100", "H100", 2048, 8),
        ("16,384 x H100", "H100", 2048, 8),
        ("1,024x8xH100", "H100", 1024, 8),
        ("2x1,000xH100", "H100", 2, 1000),
        ("16xH100-96GB", "H100-96GB", 2, 8),
        ("2xp4d.24xlarge", "A100-40GB", 2, 8),
        ("p5", "H100", 1, 8),
        ("4x8xA100-40GB", "A100-40GB", 4, 8),
        ("3x4xH100", "H100", 3, 4),
        ("2 x RTX 4090", "RTX-4090", 1, 2),
        ("8x4090", "RTX-4090", 2, 4),
        ("2xa2-megagpu-16g", "A100-40GB", 2, 16),
        ("cpu", "cpu", 1, 1),
        ("2xcpu", "cpu", 1, 2),
    ],
)
def test_text_names_a_cluster(text, device, nodes, per_node):
    found = parse_cluster(text)
    assert (found.device.name, found.num_nodes, found.devices_per_node) == (device, nodes, per_node)
    assert found.num_devices == nodes * per_node


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("0xH100", ("hardware.cluster-count-invalid", "'0xH100'", 0)),
        ("-8xH100", ("hardware.cluster-count-invalid", "-8")),
        ("8x0xH100", ("hardware.cluster-count-invalid", 0)),
        ("8xH1000", ("hardware.unknown-device", "'H1000'", "'h100'")),
        ("8xsofa", ("hardware.unknown-device", "choose one of A10,", "2xthis")),
        ("2xcpu-1.2.3c", ("hardware.unknown-device", "'cpu-1.2.3c'")),
        ("2xcpu-777c", ("hardware.unknown-device", "'cpu-777c'", "2xthis")),
        ("", ("hardware.cluster-empty", "COUNTxDEVICE")),
        ("8", ("hardware.unknown-device", "'8'")),
        ("2x2x2xH100", ("hardware.cluster-syntax", "'2x2x2xH100'")),
        ("16,38xH100", ("hardware.cluster-syntax", "'16,38'", "write 1638xH100")),
        ("8xH100,384xA100-40GB", ("hardware.cluster-mixed", "8xH100")),
        ("12xH100", ("hardware.cluster-partial-node", "12 H100", "8 or 16")),
        ("2x4xp4d", ("hardware.cluster-second-count", "p4d.24xlarge", 8, "write 2xp4d")),
        ("2x2xthis", ("hardware.cluster-second-count", "'2x2xthis'")),
    ],
)
def test_nonsense_is_refused_with_what_to_type(text, refusal):
    with refuses(*refusal) as caught:
        parse_cluster(text)
    assert caught.value.exit_code == 2


def test_description_has_devices_nodes_and_links():
    assert parse_cluster("16xH100").describe() == (
        "16 x H100 (79.1 GiB) · 2 nodes hgx-h100 of 8 · nvlink4 inside, 8 x infiniband-ndr between"
    )


def test_users_own_catalogue_is_found(tmp_path):
    folder = tmp_path / "shardwise"
    folder.mkdir()
    text = '[nodes.mine]\ndevice = "L4"\nnum_devices = 2\ninside = "pcie4"\nnic = "ethernet-25"\nnics = 1\n'
    text += 'host_link = "pcie4"\nhost_memory_gib = 64\nhost_cores = 8\nsource = "test"\n'
    (folder / "hardware.toml").write_text(text)
    assert parse_cluster("3xmine").num_devices == 6


def test_this_machine_without_gpus_shares_its_cores(monkeypatch):
    monkeypatch.setattr(cluster, "probe_gpus", tuple)
    monkeypatch.setattr(cluster, "usable_cores", lambda: 8)
    monkeypatch.setattr(cluster, "available_memory", lambda: 64 * GIB)
    one, two = parse_cluster("this"), parse_cluster("2xthis")
    assert (one.device.name, two.device.name) == ("cpu-8c", "cpu-4c")
    assert (one.device.memory_bytes, two.device.memory_bytes) == (64 * GIB, 32 * GIB)
    assert two.device.peak("fp32") == one.device.peak("fp32") / 2
    assert two.num_nodes == 1
    assert parse_cluster("2xcpu-4c") == two  # the name that plan prints
    assert parse_cluster("2xcpu-8c").num_nodes == 2  # two such machines, as plan recommends where nothing fits


def gpus(*names):
    return tuple(
        Gpu(index=index, name=name, memory_bytes=int(140.4 * GIB), compute_capability=(9, 0))
        for index, name in enumerate(names)
    )


def test_this_machine_counts_its_gpus(monkeypatch):
    monkeypatch.setattr(cluster, "probe_gpus", lambda: gpus("NVIDIA H200", "NVIDIA H200"))
    found = this_machine()
    assert (found.device.name, found.num_devices, found.device.assumed) == ("H200", 2, False)
    with refuses("hardware.too-few-gpus", 2, 3):
        this_machine(3)


def test_gpus_of_several_kinds_are_refused(monkeypatch):
    monkeypatch.setattr(cluster, "probe_gpus", lambda: gpus("NVIDIA H200", "NVIDIA X"))
    with refuses("hardware.mixed-gpus"):
        this_machine()


@pytest.mark.gpu
def test_the_gpu_at_hand_is_in_the_catalogue_with_its_memory():
    import torch

    device = this_machine().device
    assert not device.assumed
    assert device.memory_bytes == pytest.approx(torch.cuda.mem_get_info()[1], rel=0.01)
