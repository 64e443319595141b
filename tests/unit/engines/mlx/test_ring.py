"""MLX's ring, joined by our world: addresses are found, hosts that the user names are checked."""

import json
import os
import socket

import pytest

pytest.importorskip("mlx.core")

from refusals import refuses
from shardwise.engines.mlx.ring import Endpoint, join_group, parse_hosts
from shardwise.testing import run_ranks


def summed(world):
    import mlx.core as mx

    group = join_group(world)
    total = mx.distributed.all_sum(mx.array([world.rank + 1.0], dtype=mx.float64), group=group)
    return total.item(), join_group(world).size(), sorted(name for name in os.environ if name.startswith("MLX_"))


def hosts_file(tmp_path, monkeypatch, hosts):
    path = tmp_path / "hosts.json"
    path.write_text(hosts if isinstance(hosts, str) else json.dumps(hosts))
    monkeypatch.setenv("MLX_HOSTFILE", str(path))
    return path


def free_ports(number):
    with socket.socket() as first, socket.socket() as second:
        for each in (first, second)[:number]:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in (first, second)[:number]]


def test_four_ranks_find_each_other_and_sum_in_fp64_and_leave_no_variable():
    assert run_ranks(summed, 4) == [(10.0, 4, [])] * 4


def test_one_process_needs_no_ring():
    assert run_ranks(join_group, 1) == [None]


def test_hosts_that_the_user_wrote_down_are_taken(tmp_path, monkeypatch):
    first, second = free_ports(2)
    hosts_file(tmp_path, monkeypatch, [[f"127.0.0.1:{first}"], [f"127.0.0.1:{second}"]])
    assert run_ranks(summed, 2) == [(3.0, 2, ["MLX_HOSTFILE"])] * 2


def test_a_host_that_is_elsewhere_is_refused_by_rank_and_address(tmp_path, monkeypatch):
    hosts_file(tmp_path, monkeypatch, [["127.0.0.1:25101"], ["192.0.2.7:25102"]])
    with refuses("world.mlx-listen-failed", "rank 1", "192.0.2.7:25102"):
        run_ranks(join_group, 2, timeout_s=20)


def test_a_port_that_somebody_listens_on_is_refused(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        hosts_file(tmp_path, monkeypatch, [[f"127.0.0.1:{port}"], ["127.0.0.1:25102"]])
        with refuses("world.mlx-listen-failed", "rank 0", f"127.0.0.1:{port}", "in use"):
            run_ranks(join_group, 2, timeout_s=20)


def test_a_rank_that_is_another_one_for_mlx_is_refused(monkeypatch):
    monkeypatch.setenv("MLX_RANK", "0")
    with refuses("env.mlx-rank-mismatch", "MLX_RANK=0", 1, "unset MLX_RANK"):
        run_ranks(join_group, 2, timeout_s=20)


def test_a_missing_file_of_hosts_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_HOSTFILE", str(tmp_path / "none.json"))
    with refuses("env.mlx-hostfile-read-failed", "none.json", 0):
        run_ranks(join_group, 2, timeout_s=20)


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("{", ("env.mlx-hostfile-syntax",)),
        ('{"hosts": []}', ("env.mlx-hostfile-syntax",)),
        ('[["10.0.0.1:5000"]]', ("env.mlx-hostfile-size", 1, 2)),
        ('[["10.0.0.1"], ["10.0.0.2:5000"]]', ("env.mlx-hostfile-address", "'10.0.0.1'")),
        ('[["10.0.0.1:99999"], ["10.0.0.2:5000"]]', ("env.mlx-hostfile-address",)),
        ('[["10.0.0.1:5000", "10.0.0.1:5001"], ["10.0.0.2:5000"]]', ("env.mlx-hostfile-unequal",)),
        ("[[], []]", ("env.mlx-hostfile-unequal",)),
    ],
)
def test_hosts_that_mlx_could_not_use_are_refused(text, refusal):
    with refuses(*refusal):
        parse_hosts(text, 2)


def test_several_connections_a_rank_are_read():
    ring = parse_hosts('[["a:1", "a:2"], ["b:1", "b:2"]]', 2)
    assert ring[1] == (Endpoint("b", 1), Endpoint("b", 2))
