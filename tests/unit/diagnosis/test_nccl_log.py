"""Reading what NCCL writes with NCCL_DEBUG=INFO: lines of the forms that NCCL 2.4 to 2.30 print."""

from shardwise.diagnosis.catalogue import find_preset
from shardwise.diagnosis.run.nccl_log import NcclLog, effects, read_nccl_log

SOCKETS = """\
node7:4021:4021 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to eth0
node7:4021:4021 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.5<0>
node7:4021:4021 [0] NCCL INFO cudaDriverVersion 12080
node7:4021:4021 [0] NCCL INFO NCCL version 2.27.3+cuda12.8
node7:4021:4098 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 1.
node7:4021:4098 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.5<0>
node7:4021:4098 [0] NCCL INFO Using network Socket
node7:4021:4098 [0] NCCL INFO NCCL_BUFFSIZE set by environment to 4194304.
node7:4021:4098 [0] NCCL INFO NCCL_NSOCKS_PERTHREAD set by environment to 2.
node7:4021:4098 [0] NCCL INFO NCCL_SOCKET_NTHREADS set by environment to 4.
node7:4021:4101 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
node7:4021:4101 [0] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/Socket/0
"""
INFINIBAND = """\
node1:99:99 [0] NCCL INFO Bootstrap : Using ib0:10.1.0.1<0>
node1:99:120 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 0.
node1:99:120 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to ib0
node1:99:120 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB ib0:10.1.0.1<0>
node1:99:120 [0] NCCL INFO Using network IB
node1:99:120 [0] NCCL INFO NCCL_NET_GDR_LEVEL set by environment to PXB
node1:99:121 [0] NCCL INFO Channel 01/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA
"""
LIBFABRIC = """\
ip-10-0-0-1:7:9 [0] NCCL INFO NET/OFI Selected Provider is efa
ip-10-0-0-1:7:9 [0] NCCL INFO Using network AWS Libfabric
[2026-01-02 03:04:05] ip-10-0-0-1:7:9 [0] transport/net.cc:1 NCCL WARN something is odd
"""


def read(text):
    return read_nccl_log(text.splitlines())


def states(verdicts):
    return {verdict.name: verdict.state for verdict in verdicts}


def test_variables_network_interfaces_and_pairs_are_read():
    log = read(SOCKETS)
    assert log.version == "2.27.3+cuda12.8"
    assert log.read == {
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_IB_DISABLE": "1",
        "NCCL_BUFFSIZE": "4194304",
        "NCCL_NSOCKS_PERTHREAD": "2",
        "NCCL_SOCKET_NTHREADS": "4",
    }
    assert (log.networks, log.interfaces) == (("Socket",), ("eth0",))
    assert log.pairs == {"0 -> 1": "P2P/CUMEM/read", "1 -> 2": "NET/Socket/0"}
    assert log.over_sockets == ("1 -> 2",)


def test_infiniband_and_plugins_are_networks_too():
    assert read(INFINIBAND).networks == ("IB",)
    assert read(INFINIBAND).over_sockets == ()
    assert read(LIBFABRIC).networks == ("AWS Libfabric",)


def test_warnings_are_kept():
    assert read(LIBFABRIC).warnings == ("something is odd",)


def test_other_output_is_not_a_log():
    assert read("step 1 loss 2.3\nNCCL is not used\n") == NcclLog()


def test_all_of_the_preset_took_effect():
    found = states(effects(find_preset("gcp").variables, read(SOCKETS)))
    assert set(found.values()) == {"ok"}
    assert {"NCCL_SOCKET_IFNAME", "NCCL_BUFFSIZE", "network"} <= set(found)


def test_a_level_counts_by_its_name():
    assert set(states(effects(find_preset("infiniband").variables, read(INFINIBAND))).values()) == {"ok"}


def test_a_variable_that_was_never_read_is_reported():
    found = {verdict.name: verdict for verdict in effects(find_preset("gcp").variables, read(INFINIBAND))}
    assert (found["NCCL_SOCKET_NTHREADS"].state, "over IB never read" in found["NCCL_SOCKET_NTHREADS"].fact) == (
        "warn",
        True,
    )


def test_a_different_value_than_requested_is_reported():
    found = {verdict.name: verdict for verdict in effects({"NCCL_SOCKET_IFNAME": "eth1"}, read(SOCKETS))}
    assert (found["NCCL_SOCKET_IFNAME"].state, found["NCCL_SOCKET_IFNAME"].fact) == (
        "warn",
        "eth1 was set, but NCCL read eth0",
    )


def test_falling_back_to_sockets_is_a_failure_where_infiniband_was_asked_for():
    log = read(SOCKETS.replace("NCCL_IB_DISABLE set by environment to 1", "NCCL_IB_DISABLE set by environment to 0"))
    assert states(effects({"NCCL_IB_DISABLE": "0"}, log))["network"] == "fail"


def test_a_missing_log_is_reported_once_and_only_where_nccl_was_configured():
    assert states(effects(find_preset("gcp").variables, NcclLog())) == {"NCCL": "warn"}
    assert effects({"OMP_NUM_THREADS": "4"}, NcclLog()) == []
