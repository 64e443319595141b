"""Every check of a machine: one that passes it, and ones that do not."""

import msgspec
import pytest
from diagnosis.machines import CARD, ETHERNET, GIB, HEALTHY, IDLE, LOOPBACK, changed

from shardwise.diagnosis.machine.checks import CHECKS, check_machine, gloo_choice, nccl_choice, nccl_matches
from shardwise.diagnosis.machine.facts import Driver, GpuFacts, Interface, RdmaDevice, Torch
from shardwise.diagnosis.verdicts import VerdictReport, fail, ok, warn

NO_GPU = {"gpus": (), "driver": Driver(), "torch": Torch(version="2.13.0+cpu", gloo=True)}
EFA = RdmaDevice(name="rdmap0", driver="efa", active=True)

SICK = [
    ("gpus", "fail", {"driver": Driver(error="Driver/library version mismatch"), "gpus": ()}, "does not answer"),
    ("gpus", "warn", {"gpus": (), "hidden_gpus": 8}, "hides all 8"),
    ("gpus", "warn", {"gpus": (IDLE, GpuFacts(name="T4", total_bytes=GIB, used_bytes=0))}, "1 x T4"),
    (
        "gpu memory",
        "warn",
        {"gpus": (IDLE, GpuFacts(name="H100", total_bytes=80 * GIB, used_bytes=30 * GIB))},
        "30.0 GiB",
    ),
    ("driver", "fail", {"torch": {"cuda": "13.0"}}, "CUDA 13.0"),
    ("torch", "fail", {"torch": Torch(error="libcudart.so.13: cannot open")}, "libcudart"),
    ("torch", "fail", {"torch": {"version": "2.4.1"}}, "too old"),
    ("cuda", "warn", {"torch": Torch(version="2.13.0+cpu")}, "CPU build"),
    ("cuda", "fail", {"torch": {"num_gpus": 0, "cuda_error": "driver too old"}}, "detects 0 (driver too old)"),
    ("nccl", "fail", {"torch": {"nccl": ""}}, "without NCCL"),
    ("interfaces", "fail", {"network": {"interfaces": (ETHERNET,)}}, "eth0"),
    ("interfaces", "warn", {"network": {"interfaces": (LOOPBACK,), "addresses": ()}}, "lo 127.0.0.1 only"),
    ("host name", "warn", {"network": {"addresses": ()}}, "not resolve to an address"),
    ("host name", "warn", {"network": {"addresses": ("127.0.1.1",)}}, "cannot reach"),
    ("host name", "fail", {"network": {"addresses": ("10.9.9.9",)}}, "not an address of this machine"),
    ("host name", "warn", {"network": {"back_name": "other"}}, "resolves to other"),
    ("rdma", "warn", {"network": {"rdma": (CARD, RdmaDevice(name="mlx5_1", driver="", active=False))}}, "mlx5_1"),
    ("rdma", "warn", {"network": {"rdma": (EFA,)}}, "libnccl-net"),
    ("shared memory", "fail", {"memory": {"shm_total_bytes": 64 << 20, "shm_free_bytes": 64 << 20}}, "64 MiB"),
    ("shared memory", "warn", {"memory": {"shm_free_bytes": 100 << 20}}, "100 MiB"),
    ("memory", "fail", {"memory": {"available_bytes": GIB // 2}}, "512 MiB"),
    ("memory", "warn", {"memory": {"available_bytes": 3 * GIB}}, "3 GiB"),
    ("limits", "fail", {"limits": {"memlock_bytes": 8 << 20}}, "8 MiB"),
    ("limits", "fail", {"limits": {"nofile": 256}}, "256"),
    ("limits", "warn", {"limits": {"nofile": 1024}}, "1024"),
    ("limits", "warn", {"limits": {"nproc": 512}}, "512"),
    ("cores", "warn", {"cpu": {"quota": 1.0}}, "1 of 4 cores"),
    ("numa", "warn", {"cpu": {"allowed": (0, 1)}}, "bound to node 0 of 2"),
    ("disk", "fail", {"disk": {"error": "Read-only file system"}}, "Read-only"),
    ("disk", "fail", {"disk": {"free_bytes": GIB // 2}}, "512 MiB"),
    ("disk", "warn", {"disk": {"free_bytes": 5 * GIB}}, "5 GiB"),
    ("disk", "warn", {"disk": {"write_bytes_s": 1e6}}, "1 MB/s"),
    ("clock", "fail", {"clock": {"now": 1e9}}, "earlier than files"),
    ("clock", "warn", {"clock": {"disk_skew_s": 90.0}}, "+90.0 s"),
    ("clock", "warn", {"clock": {"synchronised": False}}, "not synchronized"),
]


def verdicts(machine):
    return {verdict.name: verdict for verdict in check_machine(machine)}


def test_a_healthy_machine_passes_every_check():
    found = check_machine(HEALTHY)
    assert len(found) == len({verdict.name for verdict in found}) == len(CHECKS)
    assert [verdict for verdict in found if verdict.state != "ok" or verdict.fix] == []


@pytest.mark.parametrize(("name", "state", "facts", "expected"), SICK, ids=[f"{row[0]}: {row[3]}" for row in SICK])
def test_a_failing_check_reports_the_fact_and_the_fix(name, state, facts, expected):
    found = verdicts(changed(**facts))[name]
    assert (found.state, bool(found.fix)) == (state, True)
    assert expected in found.fact


def test_every_check_has_a_machine_that_does_not_pass_it():
    assert {row[0] for row in SICK} == set(verdicts(HEALTHY))


def test_a_machine_without_gpus_is_well_on_the_cpu():
    found = verdicts(changed(**NO_GPU, network={"rdma": ()}))
    assert {verdict.state for verdict in found.values()} == {"ok"}
    assert "built without NCCL" in found["nccl"].fact


def test_efa_with_its_plugin_is_well():
    assert verdicts(changed(network={"rdma": (EFA,), "net_plugins": ("/opt/libnccl-net.so",)}))["rdma"].state == "ok"


def test_checks_that_need_torch_do_not_fail_twice_when_it_is_broken():
    found = verdicts(changed(torch=Torch(error="broken")))
    assert [name for name, verdict in found.items() if verdict.state == "fail"] == ["torch"]


def test_only_failures_change_the_exit_code():
    doubtful = VerdictReport(verdicts=(ok("a", "fine"), warn("b", "slow", "mend")))
    broken = VerdictReport(verdicts=(ok("a", "fine"), fail("b", "broken", "mend")))
    assert (doubtful.exit_code, broken.exit_code) == (0, 3)
    assert doubtful.to_text().splitlines() == [
        "ok    a  fine",
        "warn  b  slow",
        "         -> mend",
        "1 ok, 1 warnings, 0 failed",
    ]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("eth", ["eth0", "eth1"]),
        ("=eth0", ["eth0"]),
        ("=eth", []),
        ("^docker,lo", ["eth0", "eth1", "ib0"]),
        ("^=eth0", ["lo", "docker0", "eth1", "ib0"]),
        ("ib,eth1", ["eth1", "ib0"]),
    ],
)
def test_nccl_names_interfaces_by_prefix(pattern, names):
    assert nccl_matches(pattern, ["lo", "docker0", "eth0", "eth1", "ib0"]) == names


def test_nccl_prefers_infiniband_and_avoids_docker_and_loopback():
    bridge = Interface(name="docker0", up=True, addresses=("172.17.0.1",))
    ib = Interface(name="ib0", up=True, addresses=("10.1.0.5",))
    down = Interface(name="ens4", up=False, addresses=("10.2.0.5",))
    assert nccl_choice([LOOPBACK, bridge, ETHERNET, ib, down]) == ["ib0"]
    assert nccl_choice([LOOPBACK, bridge, ETHERNET, down]) == ["eth0"]
    assert nccl_choice([LOOPBACK, bridge]) == ["docker0"]
    assert nccl_choice([LOOPBACK]) == ["lo"]


def test_gloo_takes_the_interface_of_the_host_name_else_loopback():
    assert gloo_choice(HEALTHY.network) == "eth0"
    assert gloo_choice(msgspec.structs.replace(HEALTHY.network, addresses=("127.0.0.1",))) == "lo"
    assert gloo_choice(msgspec.structs.replace(HEALTHY.network, addresses=())) == "lo"
