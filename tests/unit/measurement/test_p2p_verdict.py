"""Which link is slow: decided from numbers alone, so that every case can be written down."""

from measurement.links import both, made

from shardwise.measurement.p2p import every_pair
from shardwise.measurement.p2p_verdict import find_slow, verdict_sentences


def test_links_that_differ_by_noise_are_all_alike():
    pairs = made("aabb", noise=lambda pair: 1 + 0.2 * ((3 * pair[0] + pair[1]) % 4))
    assert find_slow(pairs) == ()
    assert verdict_sentences(pairs) == ["all alike: no pair of 4 ranks is 2 times as slow as the others of its kind"]


def test_a_slow_pair_is_named_once_for_both_directions_with_hosts_and_factor():
    [link] = find_slow(made("abcd", latency=both(1, 3, 2e-3)))
    assert (link.quantity, link.pairs, round(link.factor)) == ("latency", ((1, 3), (3, 1)), 20)
    assert link.sentence == (
        "rank 1 (hostb) and rank 3 (hostd): latency 2 ms, 20 times as slow as the 100 us of the others across nodes"
    )


def test_a_slow_direction_is_named_as_one():
    [link] = find_slow(made("aaaa", rate={(2, 0): 2e8}))
    assert (link.quantity, link.pairs) == ("bandwidth", ((2, 0),))
    assert link.sentence == (
        "rank 2 (hosta) to rank 0 (hosta): bandwidth 200 MB/s, 5 times as slow as the 1 GB/s of the others in one node"
    )


def test_a_slow_host_is_named_though_its_links_are_the_most():
    slow = {**both(0, 2, 10e-3), **both(1, 2, 10e-3)}
    [link] = find_slow(made("abc", latency=slow))
    assert link.pairs == ((0, 2), (1, 2), (2, 0), (2, 1))
    assert link.sentence.startswith("every link of hostc: latency 10 ms, 100 times as slow as the 100 us")


def test_a_slow_host_with_many_ranks_is_one_finding():
    slow = {
        pair: 10e-3
        for pair in every_pair(6)
        if len({pair[0] // 2, pair[1] // 2} & {1}) and pair[0] // 2 != pair[1] // 2
    }
    [link] = find_slow(made("aabbcc", latency=slow))
    assert link.sentence.startswith("every link of hostb")
    assert set(link.pairs) == set(slow)


def test_a_slow_rank_of_a_node_is_named():
    slow = {pair: 1e-3 for pair in every_pair(4) if 3 in pair}
    [link] = find_slow(made("aaaa", latency=slow))
    assert link.sentence.startswith("every link of rank 3 (hosta)")


def test_a_rank_with_one_very_slow_link_is_not_slow_itself():
    [link] = find_slow(made("aaa", latency={**both(0, 2, 10e-3), **both(1, 2, 250e-6)}))
    assert link.pairs == ((0, 2), (2, 0))


def test_a_slow_pair_beside_a_slow_host_is_found_too():
    slow = {**{pair: 10e-3 for pair in every_pair(5) if 4 in pair}, **both(0, 1, 1e-3)}
    host, pair = find_slow(made("abcde", latency=slow))
    assert host.sentence.startswith("every link of hoste")
    assert pair.pairs == ((0, 1), (1, 0))


def test_links_across_nodes_are_not_compared_with_those_in_a_node():
    across = {pair: 5e-3 for pair in every_pair(4) if pair[0] // 2 != pair[1] // 2}
    assert find_slow(made("aabb", latency=across)) == ()


def test_a_link_that_is_slow_in_one_direction_only_is_not_a_slow_link():
    pairs = made("aaaa", latency={(0, 1, "send"): 5e-3}, ways=("send", "isend"))
    assert find_slow(pairs) == ()


def test_of_two_ranks_the_slow_direction_is_named():
    alike = "all alike: both directions; two ranks have no other pair for a comparison"
    assert verdict_sentences(made("ab")) == [alike]
    [link] = find_slow(made("ab", rate={(0, 1): 1e8}))
    assert link.sentence.startswith("rank 0 (hosta) to rank 1 (hostb): bandwidth 100 MB/s, 10 times")


def test_the_worst_link_comes_first():
    slow = {**both(0, 1, 1e-3), **both(2, 3, 5e-3)}
    assert [link.pairs[0] for link in find_slow(made("abcdef", latency=slow))] == [(2, 3), (0, 1)]
