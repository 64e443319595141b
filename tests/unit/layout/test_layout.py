import pytest

from refusals import refuses
from shardwise.layout import AXES, Layout, parse_layout


def test_rank_and_coordinate_are_inverse_at_sixteen_thousand_ranks():
    layout = Layout(pp=8, replicate=4, shard=16, cp=4, tp=8)
    assert layout.world_size == 16_384
    assert all(layout.rank(layout.coordinate(rank)) == rank for rank in range(layout.world_size))


def test_tensor_parallel_peers_are_neighbours():
    assert Layout(shard=2, tp=2).groups("tp") == ((0, 1), (2, 3))
    assert Layout(shard=2, tp=2).groups("shard") == ((0, 2), (1, 3))


@pytest.mark.parametrize("axis", AXES)
def test_groups_of_an_axis_cover_every_rank_once(axis):
    layout = Layout(pp=2, replicate=3, shard=2, cp=2, tp=2)
    groups = layout.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    assert {len(group) for group in groups} == {getattr(layout, axis)}


def test_ranks_that_share_samples_share_a_data_index():
    layout = Layout(pp=2, replicate=2, shard=2, tp=2)
    dp_ranks = [layout.data_index(rank) for rank in range(layout.world_size)]
    assert set(dp_ranks) == set(range(layout.dp))
    assert all(dp_ranks[group[0]] == dp_ranks[rank] for group in layout.groups("tp") for rank in group)
    assert all(dp_ranks[group[0]] == dp_ranks[rank] for group in layout.groups("pp") for rank in group)


@pytest.mark.parametrize("text", ["one", "replicate2", "pp2.shard2.tp2", "pp4.replicate2.shard8.cp2.tp8"])
def test_layout_text_round_trips(text):
    assert str(parse_layout(text)) == text


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("tp", ("layout.syntax", "'tp'")),
        ("tp2.tp2", ("layout.axis-repeated", "axis tp")),
        ("ep2", ("layout.axis-reserved", "ep")),
        ("shrad2", ("layout.unknown-axis", "'shard'")),
        ("tp0", ("layout.degree-invalid", "tp", 0)),
    ],
)
def test_malformed_layouts_are_refused_with_the_fix(text, refusal):
    with refuses(*refusal):
        parse_layout(text)


def test_rank_outside_the_layout_is_refused():
    with refuses("layout.rank-out-of-range", "0 to 3"):
        Layout(shard=4).coordinate(4)


def test_ranks_that_share_sequences_are_shards_of_the_parameters():
    layout = Layout(replicate=2, shard=2, cp=2, tp=2)
    assert str(layout.folded) == "replicate2.shard4.tp2"
    assert layout.folded.groups("shard") == layout.groups("shard", "cp")


def test_every_slice_of_tokens_draws_and_reports_by_itself():
    layout = Layout(shard=2, cp=2, tp=2)
    assert [layout.draw_index(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [layout.data_index(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [layout.reports_loss(rank) for rank in range(8)] == [True, False] * 4
