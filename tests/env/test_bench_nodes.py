"""Measuring across machines: hosts are namespaces, one of them behind a cable with a delay."""

import json

import pytest

from env.namespaces import hosts, why_not
from env.nodes import LAUNCH, start

pytestmark = [
    pytest.mark.prove,  # a link that is delayed within one machine: tests/unit/bench/test_p2p.py
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "never"),
    pytest.mark.timeout(300),
]
DELAY_MS = 40
"""Longer than a message takes on a busy machine."""


def bench_p2p(folder, count, nproc, options, *, slow):
    """Run `bench p2p` on `count` hosts of which number `slow` has the delay; return what node 0 wrote."""
    with hosts(count, shared=folder) as made:
        made[slow].delay(DELAY_MS)
        nodes = []
        for host in made:
            rendezvous = [f"--node_rank={host.number}", "--master_addr=10.77.0.1", "--master_port=29500"]
            launch = [*LAUNCH, f"--nnodes={count}", f"--nproc_per_node={nproc}", *rendezvous]
            nodes.append(start(host, folder, [*launch, "-m", "shardwise", "bench", "p2p", *options]))
        codes = [node.wait(200) for node in nodes]
        outputs = [node.output() for node in nodes]
        assert codes == [0] * count, outputs
        assert [host.processes() for host in made] == [{}] * count
    assert not any("latency" in output for output in outputs[1:])  # rank 0 alone shows it
    return outputs[0]


def test_a_host_behind_a_delay_is_found_and_its_cells_show_it(tmp_path):
    options = ["--json", "--way", "isend", "--size", "4KiB", "--seconds", "1"]
    found = json.loads(bench_p2p(tmp_path, 3, 1, options, slow=2).splitlines()[-1])
    latency_s = {(link["source"], link["target"]): link["latency_s"] for link in found["links"]}
    through = {pair for pair in latency_s if 2 in pair}
    assert all(latency_s[pair] >= DELAY_MS / 1e3 for pair in through)
    assert max(latency_s[pair] for pair in set(latency_s) - through) < min(latency_s[pair] for pair in through)
    assert [place["host"] for place in found["pairs"]["places"]] == ["host0", "host1", "host2"]
    slow = next(link for link in found["slow"] if link["quantity"] == "latency")
    assert {tuple(pair) for pair in slow["pairs"]} == through
    assert slow["sentence"].startswith("every link of host2: latency ")
    assert not any(cell["wrong"] for cell in found["pairs"]["timings"])


@pytest.mark.parametrize("slow", [0, 2])
def test_the_matrix_of_two_ranks_a_host_shows_the_delay_in_the_right_cells(tmp_path, slow):
    page = tmp_path / "links.html"
    options = ["--size", "4KiB", "--way", "send", "--way", "isend", "--seconds", "5", "--report", page]
    shown = bench_p2p(tmp_path, 3, 2, options, slow=slow).splitlines()
    start_ = next(number for number, line in enumerate(shown) if "latency of 8 B in us" in line)
    assert shown[start_ + 1].split() == [str(rank) for rank in range(6)]
    rows = [line.split()[2:] for line in shown[start_ + 2 : start_ + 8]]
    marked = {(row, column) for row, cells in enumerate(rows) for column, cell in enumerate(cells) if "*" in cell}
    expected = {(a, b) for a in range(6) for b in range(6) if a // 2 != b // 2 and slow in (a // 2, b // 2)}
    assert marked == expected
    assert all(float(rows[a][b].rstrip("*").replace(",", "")) >= 1e3 * DELAY_MS for a, b in expected)
    assert any(line.startswith(f"slow: every link of host{slow}: latency ") for line in shown)
    assert f"every link of host{slow}" in page.read_text()


def test_two_hosts_show_the_delay_across_and_not_within(tmp_path):
    options = ["--json", "--way", "isend", "--size", "4KiB", "--seconds", "1"]
    found = json.loads(bench_p2p(tmp_path, 2, 2, options, slow=1).splitlines()[-1])
    for link in found["links"]:
        across = link["source"] // 2 != link["target"] // 2
        assert (link["latency_s"] >= DELAY_MS / 1e3) == across
