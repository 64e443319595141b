"""Which node runs the hub, and where it listens."""

from refusals import refuses
from shardwise.launcher.nodes.network import listen
from shardwise.launcher.nodes.node import NodesSpec, _hub_listener


def at(host, port=0, **options):
    return NodesSpec(least=2, most=2, host=host, port=port, **options)


def test_node_at_the_endpoint_listens_where_the_user_asks():
    with _hub_listener(at("127.0.0.1", local_addr="127.0.0.2")) as listener:
        assert listener.getsockname()[0] == "127.0.0.2"


def test_address_that_cannot_be_listened_at_is_refused_and_not_taken_for_another_node():
    with refuses("launch.local-address-unknown", "192.0.2.1"):
        _hub_listener(at("127.0.0.1", local_addr="192.0.2.1"))


def test_second_node_of_a_machine_leaves_the_hub_to_the_first():
    with listen("127.0.0.1", 0) as first:
        assert _hub_listener(at("127.0.0.1", first.getsockname()[1])) is None
