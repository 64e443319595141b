"""How links are shown: matrices on a terminal, by node where ranks are many, and heat maps in a report."""

import pytest
from measurement.links import both, made

from shardwise.measurement.p2p_report import MOST_CELLS, P2pReport, find_links

FACTS = (("host", "here"),)


def lines(pairs):
    return P2pReport(pairs=pairs).to_text().splitlines()


def test_the_delay_stands_in_the_right_cells_of_the_matrix():
    shown = lines(made("abcd", latency=both(1, 3, 2e-3)))
    start = next(number for number, line in enumerate(shown) if line.startswith("best latency of 8 B in us"))
    matrix = [line.split() for line in shown[start + 1 : start + 6]]
    assert matrix[0] == ["0", "1", "2", "3"]
    assert matrix[2] == ["1", "hostb", "100", "-", "100", "2,000*"]
    assert matrix[4] == ["3", "hostd", "100", "2,000*", "100", "-"]
    assert matrix[1] == ["0", "hosta", "-", "100", "100", "100"]
    assert any(line.startswith("best bandwidth of 976.6 KiB in GB/s") for line in shown)
    assert shown[-1].startswith("slow: rank 1 (hostb) and rank 3 (hostd)")


def test_more_than_sixteen_ranks_are_shown_by_node():
    shown = lines(made("a" * 9 + "b" * 9, latency=both(0, 17, 2e-3)))
    [row] = [line.split() for line in shown if line.startswith("hosta") and "2,000" in line]
    assert row == ["hosta", "100", "/", "100", "/", "100", "100", "/", "100", "/", "2,000"]


def test_units_suit_slow_links():
    shown = lines(made("ab", latency=both(0, 1, 20e-3), rate=both(0, 1, 2e6)))
    assert "best latency of 8 B in ms, from row to column" in shown
    assert "best bandwidth of 976.6 KiB in MB/s, from row to column" in shown
    assert ["0", "hosta", "-", "2.00"] in [line.split() for line in shown]


def test_a_report_has_both_heat_maps_with_the_slow_cells_marked():
    findings = find_links(made("abcd", latency=both(1, 3, 2e-3), ways=("send", "isend")), FACTS)
    latency, bandwidth = findings.sections[0].parts
    assert latency.values[1] == pytest.approx((100, None, 100, 2000))
    assert latency.marked == ((1, 3), (3, 1))
    assert bandwidth.marked == ()
    assert latency.row_labels == ("0 hosta", "1 hostb", "2 hostc", "3 hostd")
    assert findings.verdict.startswith("slow: rank 1 (hostb)")
    assert [section.title for section in findings.sections[2:]] == ["send", "isend"]
    assert findings.facts[0] == FACTS[0]


def test_a_report_of_many_ranks_has_a_cell_for_each_pair_of_nodes():
    many = MOST_CELLS // 2 + 1
    latency = find_links(made("a" * many + "b" * many), FACTS).sections[0].parts[0]
    assert latency.row_labels == ("hosta", "hostb")
    assert [[round(value) for value in row] for row in latency.values] == [[100, 100], [100, 100]]
