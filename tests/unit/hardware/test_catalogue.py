"""What the catalogue holds, how a user's file changes it, and what it refuses."""

from pathlib import Path

import pytest

from refusals import refuses
from shardwise.hardware import Gpu
from shardwise.hardware.cluster import read_catalogue
from shardwise.hardware.machine import Device, NodeType
from shardwise.units import GIB

ABSENT = Path("/nowhere/hardware.toml")
OURS = read_catalogue(user=ABSENT)
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "hardware.md"
DEVICES = (
    *("V100-16GB", "V100-32GB", "A100-40GB", "A100-80GB", "H100", "H100-PCIe", "H100-96GB", "H200", "B200"),
    *("L4", "L40S", "A10", "RTX-3090", "RTX-4090", "MI300X", "cpu"),
)
NODES = (
    *("p3", "p4d", "p4de", "p5", "nd-a100-v4", "nd-h100-v5", "azure-nd"),
    *("gcp", "waterfield", "a2-highgpu", "a3-highgpu", "g2"),
)

MINE = """
[devices.X1]
kind = "cuda"
memory_gib = 64
memory_bandwidth_gbs = 2000
tflops = { fp32 = 50, bf16 = 500 }
node = "x1-box"
source = "test"

[nodes.x1-box]
device = "X1"
num_devices = 4
inside = "pcie5"
nic = "ethernet-100"
nics = 1
host_link = "pcie5"
host_memory_gib = 256
host_cores = 32
source = "test"
"""


def with_file(tmp_path, text, name="mine.toml"):
    file = tmp_path / name
    file.write_text(text)
    return read_catalogue(file, user=ABSENT)


@pytest.mark.parametrize(
    "name",
    [
        "V100-16GB",
        "V100-32GB",
        "A100-40GB",
        "A100-80GB",
        "H100",
        "H100-PCIe",
        "H100-96GB",
        "H200",
        "B200",
        "L4",
        "L40S",
        "A10",
        "RTX-3090",
        "RTX-4090",
        "MI300X",
        "cpu",
    ],
)
def test_device_is_listed_with_its_source(name):
    device = OURS.find(name)
    assert isinstance(device, Device)
    assert device.source


@pytest.mark.parametrize(
    "name",
    [
        "p3",
        "p4d",
        "p4de",
        "p5",
        "nd-a100-v4",
        "nd-h100-v5",
        "azure-nd",
        "gcp",
        "waterfield",
        "a2-highgpu",
        "a3-highgpu",
        "g2",
    ],
)
def test_cloud_node_is_listed(name):
    assert isinstance(OURS.find(name), NodeType)


def test_every_device_has_a_usual_node_of_its_own_kind():
    assert [device.name for device in OURS.devices.values() if OURS.nodes[device.node].device != device] == []


def test_every_alias_leads_to_its_entry():
    entries = (*OURS.devices.values(), *OURS.nodes.values())
    assert [name for entry in entries for name in (entry.name, *entry.aliases) if OURS.find(name) is not entry] == []


def test_large_matmuls_never_beat_the_peak():
    over = [
        (device.name, dtype)
        for device in OURS.devices.values()
        for dtype in device.flops
        if device.sustained(dtype) > device.peak(dtype)
    ]
    assert over == []


def test_dense_rates_halve_with_each_doubling_of_width():
    h100 = OURS.find("H100")
    assert h100.peak("fp8") / h100.peak("bf16") == pytest.approx(2, rel=1e-3)
    assert h100.peak("bf16") / h100.peak("tf32") == pytest.approx(2, rel=1e-3)


def test_volta_has_no_bf16_and_computes_it_as_fp32():
    v100 = OURS.find("V100")
    assert not v100.has_bf16
    assert v100.peak("bf16") == v100.peak("fp32")


def test_names_are_found_in_any_case():
    assert OURS.find("rtx 4090") is OURS.find("RTX-4090")
    assert OURS.find("standard_nd96asr_v4") is OURS.find("Standard_ND96asr_v4")


def test_network_of_a_node_is_shared_by_its_devices():
    p4d = OURS.find("p4d")
    assert p4d.outside_bandwidth == 50e9
    assert p4d.outside.bandwidth == 50e9 / 8


def test_fewer_devices_keep_their_own_cards_but_share_a_common_one():
    assert OURS.find("hgx-h100").with_devices(4).outside.bandwidth == 50e9
    assert OURS.find("a2-highgpu-8g").with_devices(4).outside.bandwidth == 12.5e9 / 4


@pytest.mark.parametrize(
    ("driver", "gib", "name"),
    [
        ("NVIDIA H200", 140.4, "H200"),
        ("NVIDIA H100 80GB HBM3", 79.6, "H100"),
        ("NVIDIA H100", 95.6, "H100-96GB"),
        ("NVIDIA A100-SXM4-40GB", 40.0, "A100-40GB"),
        ("Tesla V100-SXM2-32GB", 32.0, "V100-32GB"),
        ("NVIDIA GeForce RTX 4090", 23.99, "RTX-4090"),
    ],
)
def test_driver_names_are_recognised(driver, gib, name):
    gpu = Gpu(index=0, name=driver, memory_bytes=int(gib * GIB), compute_capability=(9, 0))
    assert OURS.identify(gpu) is OURS.devices[name]


def test_unknown_gpu_borrows_the_rates_of_a_relative_and_reports_it():
    gpu = Gpu(index=0, name="NVIDIA RTX 6000 Ada", memory_bytes=48 * GIB, compute_capability=(8, 9))
    device = OURS.identify(gpu)
    assert (device.name, device.memory_bytes, device.assumed) == (gpu.name, gpu.memory_bytes, True)
    assert device.flops == OURS.devices["L40S"].flops


def test_user_file_adds_a_device_and_its_node(tmp_path):
    device = with_file(tmp_path, MINE).find("x1")
    assert device.flops == {"fp32": 50e12, "bf16": 500e12}
    assert with_file(tmp_path, MINE).node_of(device).num_devices == 4


def test_named_file_wins_over_the_users_own_and_that_over_ours(tmp_path):
    user = tmp_path / "user.toml"
    user.write_text(MINE + MINE.replace("X1", "X2").replace("x1-box", "x2-box"))
    extra = tmp_path / "extra.toml"
    extra.write_text(MINE.replace("memory_gib = 64", "memory_gib = 32"))
    catalogue = read_catalogue(extra, user=user)
    assert [catalogue.find(name).memory_bytes // GIB for name in ("X1", "X2")] == [32, 64]


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (("memory_gib = 64", "memry_gib = 64"), ("hardware.catalogue-unknown-key", "'memry_gib'", "'memory_gib'")),
        (("memory_gib = 64", ""), ("hardware.catalogue-key-missing", "devices.X1", "memory_gib")),
        (("memory_gib = 64", "memory_gib = -4"), ("hardware.not-positive", "device X1", "memory_bytes")),
        (("memory_gib = 64", 'memory_gib = "64"'), ("hardware.catalogue-value-invalid", "memory_gib", "'64'")),
        (("memory_gib = 64", "memory_gib = nan"), ("hardware.catalogue-value-invalid", "memory_gib", "nan")),
        (("fp32 = 50,", ""), ("hardware.device-no-fp32-rate", "X1")),
        (("fp32 = 50,", "fp23 = 50,"), ("hardware.catalogue-value-invalid", "fp23")),
        (('kind = "cuda"', 'kind = "tpu"'), ("hardware.catalogue-value-invalid", "'tpu'", '"cuda", "rocm" or "cpu"')),
        (('inside = "pcie5"', 'inside = "pcie55"'), ("hardware.catalogue-unknown-reference", "'pcie55'", "'pcie5'")),
        (('device = "X1"', 'device = "X"'), ("hardware.catalogue-unknown-reference", "device 'X'")),
        (("num_devices = 4", "num_devices = 0"), ("hardware.not-positive", "x1-box", "num_devices", 0)),
        (("[nodes.x1-box]", "[node.x1-box]"), ("hardware.catalogue-unknown-section", "'node'", "'nodes'")),
        (
            ("[devices.X1]", '[devices.X1]\naliases = ["h100"]'),
            ("hardware.catalogue-name-repeated", "H100", "X1", "'h100'"),
        ),
        (("[devices.X1]", "[devices.X1"), ("hardware.catalogue-not-toml", "mine.toml")),
    ],
)
def test_broken_file_is_refused_in_one_sentence(tmp_path, change, refusal):
    with refuses(*refusal):
        with_file(tmp_path, MINE.replace(*change))


def test_missing_file_is_refused():
    with refuses("hardware.catalogue-read-failed", "/nowhere/hardware.toml"):
        read_catalogue(ABSENT, user=ABSENT)


def test_page_lists_the_catalogue():
    text = PAGE.read_text()
    table = text.partition("<!-- devices -->\n")[2].partition("<!-- end devices -->")[0]
    assert table == device_table()


def device_table():
    rows = [
        "| device | GiB | TB/s | dense 16-bit TFLOP/s | reached in large matmuls | usual node |",
        "|---|---|---|---|---|---|",
    ]
    for device in OURS.devices.values():
        dtype = next(name for name in ("bf16", "fp16", "fp32") if name in device.flops)
        peak, reached = f"{device.peak(dtype) / 1e12:g}", f"{device.sustained(dtype) / 1e12:g}"
        node = OURS.nodes[device.node]
        memory = f"{device.memory_bytes / GIB:.1f} | {device.memory_bandwidth / 1e12:g}"
        rows.append(
            f"| {device.name} | {memory} | {peak} | {reached} "
            f"| {node.num_devices} in {node.name}, {node.inside.name}, {node.nics} x {node.nic.name} |"
        )
    return "\n".join(rows) + "\n"
