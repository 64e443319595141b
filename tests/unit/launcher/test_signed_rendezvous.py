"""The state of a rendezvous is loaded only where a node of the run has signed it."""

import base64
import pickle
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.api import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from shardwise.environment import variables
from shardwise.launcher.local.processes import RendezvousResult, StartRendezvous
from shardwise.launcher.nodes.messages import rendezvous_key
from shardwise.launcher.nodes.rendezvous import _join
from shardwise.launcher.nodes.signed_rendezvous import SignedBackend

KEY = rendezvous_key("secret", "run.0")


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


def backend(store, key=KEY):
    return SignedBackend(C10dRendezvousBackend(store, "run.0"), key)


def test_nodes_with_the_key_share_one_state(store):
    one, other = backend(store), backend(store)
    assert one.get_state() is None
    state, token, is_ours = one.set_state(b"first")
    assert (state, is_ours) == (b"first", True)
    assert other.get_state() == (b"first", token)
    assert other.set_state(b"late", None)[::2] == (b"first", False)
    assert other.set_state(b"second", token)[::2] == (b"second", True)
    assert one.get_state()[0] == b"second"


@pytest.mark.parametrize("key", ["", rendezvous_key("other", "run.0"), rendezvous_key("secret", "run.1")])
def test_a_state_signed_with_another_key_is_refused(store, key):
    backend(store, key).set_state(b"state")
    with pytest.raises(RendezvousStateError, match="does not have a valid signature"):
        backend(store).get_state()
    with pytest.raises(RendezvousStateError):
        backend(store).set_state(b"mine")


class Planted:
    """Code that loading its pickle runs."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.timeout(120)
def test_a_pickle_that_somebody_planted_in_the_store_is_never_loaded(store, tmp_path):
    store.set("torch.rendezvous.run.0", base64.b64encode(pickle.dumps(Planted(tmp_path / "ran"))).decode())
    order = StartRendezvous(
        host="127.0.0.1",
        port=store.port,
        run_id="run.0",
        node=0,
        nproc=3,
        least=1,
        most=1,
        join_s=60.0,
        last_call_s=0.1,
        environ=variables(""),
        key=KEY,
    )
    with pytest.raises(RendezvousStateError):
        _join(order)
    assert not (tmp_path / "ran").exists()
    store.delete_key("torch.rendezvous.run.0")
    assert _join(order) == RendezvousResult((0,), (3,), 3)
