import pytest

from refusals import refuses
from shardwise.launcher.options import (
    Shown,
    check_nodes,
    read_endpoint,
    read_nodes,
    read_nproc,
    read_port,
    read_rdzv_conf,
    read_streams,
    shown,
)


@pytest.mark.parametrize(
    ("text", "gpus", "expected"),
    [("3", 0, 3), ("gpu", 4, 4), ("cpu", 4, 8), ("auto", 4, 4), ("auto", 0, 8), ("2", 2, 2)],
)
def test_nproc_is_a_number_or_what_the_machine_has(text, gpus, expected):
    assert read_nproc(text, num_gpus=gpus, num_cores=8) == expected


@pytest.mark.parametrize(
    ("text", "gpus", "refusal"),
    [
        ("gpu", 0, ("launch.no-gpu",)),
        ("0", 0, ("launch.nproc-invalid", "at least 1")),
        ("x", 0, ("launch.nproc-invalid", "'x'")),
        ("9", 8, ("launch.nproc-exceeds-gpus", 9, 8)),
    ],
)
def test_nproc_that_cannot_be_is_refused(text, gpus, refusal):
    with refuses(*refusal):
        read_nproc(text, num_gpus=gpus, num_cores=8)


def test_nodes_are_a_number_or_a_range():
    assert (read_nodes("1"), read_nodes("1:4")) == ((1, 1), (1, 4))
    for text in ("0", "4:1", "two", "1:2:3"):
        with refuses("launch.nnodes-invalid"):
            read_nodes(text)


@pytest.mark.parametrize(
    ("nodes", "rank", "backend", "refusal"),
    [
        ((1, 1), 1, "c10d", ("launch.node-rank-invalid", "0 to 0")),
        ((2, 3), 3, "c10d", ("launch.node-rank-invalid", "0 to 2")),
        ((1, 1), 0, "etcd", ("launch.rdzv-backend-unknown", "'etcd'", "static or c10d")),
    ],
)
def test_node_options_that_contradict_each_other_are_refused(nodes, rank, backend, refusal):
    with refuses(*refusal):
        check_nodes(nodes, rank, backend)


def endpoint(backend="static", rdzv="", addr=None, port=None):
    return read_endpoint(rdzv_backend=backend, rdzv_endpoint=rdzv, master_addr=addr, master_port=port)


def test_either_option_gives_the_rendezvous_endpoint():
    assert endpoint(addr="10.0.0.1", port=1234) == ("10.0.0.1", 1234)
    assert endpoint(addr="a") == ("a", 29500)
    assert endpoint("c10d", "a:29400") == ("a", 29400)
    assert endpoint("c10d", "a") == ("a", 29400)
    assert endpoint("c10d", "[fd00::1]:5") == ("fd00::1", 5)


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        ({}, ("launch.endpoint-missing",)),
        ({"rdzv": "a:b:c"}, ("launch.endpoint-invalid", "'a:b:c'", "HOST:PORT")),
        ({"rdzv": "a:1", "addr": "b"}, ("launch.endpoint-contradicts", "--master-addr b")),
        ({"rdzv": "a:1", "port": 2}, ("launch.endpoint-contradicts", 1, 2)),
        ({"rdzv": "a:99999"}, ("launch.port-invalid", "99999")),
    ],
)
def test_endpoint_that_cannot_be_is_refused(arguments, refusal):
    with refuses(*refusal):
        endpoint(**arguments)


def test_waits_come_from_torchruns_configuration():
    assert read_rdzv_conf("join_timeout=60,last_call_timeout=3,read_timeout=9") == {"join_s": 60.0, "last_call_s": 3.0}
    for text in ("join_timeout", "join_timeout=soon"):
        with refuses("launch.rdzv-conf-invalid"):
            read_rdzv_conf(text)


def test_port_comes_from_either_option():
    assert read_port("", None, standalone=False) == 0
    assert read_port("localhost:29400", None, standalone=False) == 29400
    assert read_port("localhost:29400", 29400, standalone=False) == 29400
    for code, endpoint, port, standalone in [
        ("launch.endpoint-contradicts", "h:1", 2, False),
        ("launch.standalone-with-port", "h:1", None, True),
        ("launch.port-invalid", "", 70000, False),
    ]:
        with refuses(code):
            read_port(endpoint, port, standalone=standalone)


def test_streams_are_read_as_torchrun_does():
    assert read_streams("tee", "3", 2) == [(True, True), (True, True)]
    assert read_streams("tee", "0:1,1:2", 2) == [(True, False), (False, True)]
    for text in ("4", "0:5", "x"):
        with refuses("launch.streams-invalid", "--tee", text):
            read_streams("tee", text, 2)
    with refuses("launch.stream-rank-unknown", "--tee", "rank 7", "0 to 1"):
        read_streams("tee", "7:1", 2)


def test_output_is_copied_unless_redirected_filtered_or_left_on_the_terminal():
    plain, tee, hidden = Shown(), Shown(prefixed=True), Shown(copied=False)
    assert shown(redirects=None, tee="0", ranks_filter="", nproc=1) == [(plain, plain)]
    assert shown(redirects=None, tee="1", ranks_filter="", nproc=1) == [(tee, plain)]
    assert shown(redirects="3", tee="0", ranks_filter="", nproc=1) == [(hidden, hidden)]
    assert shown(redirects=None, tee="0", ranks_filter="1", nproc=2) == [(hidden, hidden), (plain, plain)]
    assert shown(redirects="0", tee="0", ranks_filter="", nproc=1)[0][0].terminal
