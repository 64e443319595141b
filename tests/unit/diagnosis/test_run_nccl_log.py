"""What NCCL wrote becomes the transport of each pair, and TCP is flagged; lines as NCCL 2.19 to 2.28 write them."""

from shardwise.diagnosis.run.nccl_log import check_transports, kind_of, read_nccl_log

ONE_NODE = """
node1:4711:4711 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.1<0>
node1:4711:4711 [0] NCCL INFO cudaDriverVersion 12080
node1:4711:4711 [0] NCCL INFO NCCL version 2.28.9+cuda12.9
node1:4711:4790 [0] NCCL INFO Using network Socket
node1:4711:4790 [0] NCCL INFO ncclCommInitRankConfig comm 0x55d0 rank 0 nranks 2 cudaDev 0 busId 18000 - Init START
node1:4711:4790 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
node1:4711:4790 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM/read
node1:4712:4791 [1] NCCL INFO Channel 00/0 : 1[1] -> 0[0] via SHM/direct/direct
node1:4711:4790 [0] NCCL INFO Connected all rings, use ring PXN 0 GDR 1
"""
TWO_NODES = """
node1:4711:4790 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC
node1:4711:4790 [0] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/Socket/0
node2:4712:4791 [0] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [receive] via NET/Socket/0
node2:4712:4791 [0] NCCL INFO Channel 00/0 : 3[1] -> 0[0] [send] via NET/Socket/0
"""
HOSTS = {0: "node1", 1: "node1", 2: "node2", 3: "node2"}


def check(text, hosts=HOSTS):
    return check_transports(read_nccl_log(text.splitlines()), hosts)


def test_pairs_of_one_node_are_reported_by_transport():
    (verdict,) = check(ONE_NODE)
    assert verdict.state == "ok"
    assert "P2P (GPU to GPU, by NVLink or PCIe) for pair 0->1" in verdict.fact
    assert "SHM (shared host memory) for pair 1->0" in verdict.fact


def test_a_fallback_to_tcp_between_nodes_is_flagged_with_its_pairs():
    transports, flagged = check(TWO_NODES)
    assert "NET/Socket (TCP) for pairs 1->2, 3->0" in transports.fact
    assert flagged.state == "warn"
    assert flagged.fact.startswith("pairs 1->2, 3->0 fell back to TCP")


def test_infiniband_between_nodes_is_not_a_fallback():
    (verdict,) = check(TWO_NODES.replace("NET/Socket/0", "NET/IB/0/GDRDMA"))
    assert "NET/IB (InfiniBand or RoCE) for pairs 1->2, 3->0" in verdict.fact


def test_a_plugin_is_reported_by_its_name():
    (verdict,) = check(TWO_NODES.replace("NET/Socket/0", "NET/AWS Libfabric/0/GDRDMA"))
    assert "NET/AWS Libfabric for pairs 1->2, 3->0" in verdict.fact


def test_ranks_of_one_host_that_go_through_the_network_are_flagged():
    text = "node1:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] [send] via NET/Socket/0"
    _, flagged = check(text)
    assert flagged.fact.startswith("pair 0->1 on one host communicated over the network")
    assert "NCCL_SHM_DISABLE" in flagged.fix


def test_warnings_of_nccl_are_reported():
    text = ONE_NODE + "node1:4711:4790 [0] transport/net_socket.cc:12 NCCL WARN NET/Socket : no interface found\n"
    assert "no interface found" in check(text)[-1].fact


def test_a_missing_log_gives_no_verdict():
    assert check("rank 0 prints NCCL\nnothing else") == []


def test_kinds_are_what_is_before_the_device():
    ways = ("P2P/CUMEM/read", "SHM/direct/direct", "NET/IB/1/GDRDMA", "NET/Socket/0", "NVLS")
    assert [kind_of(way) for way in ways] == ["P2P", "SHM", "NET/IB", "NET/Socket", "NVLS"]
