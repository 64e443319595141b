"""A rendezvous backend of torch with signed state.

torch stores the rendezvous state in the store as a pickle and unpickles it on every node, so a client with write access
to the store could execute code on all nodes. Each node therefore signs the state with a key derived from the run's
secret, and rejects state without a valid signature.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

from torch.distributed.elastic.rendezvous.api import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import Token

_DIGEST = "sha256"
_MAC_BYTES = 32


class SignedBackend(RendezvousBackend):
    """Stores the rendezvous state in another backend, prefixed by its signature."""

    def __init__(self, backend: RendezvousBackend, key: str) -> None:
        self._backend = backend
        self._key = key.encode()

    @property
    def name(self) -> str:
        """Name of the wrapped backend."""
        return self._backend.name

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state and its token, or None; raise RendezvousStateError if the signature is invalid."""
        found = self._backend.get_state()
        return None if found is None else (self._verified(found[0]), found[1])

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Replace the state if `token` is current; return the resulting state, its token, and whether it was set."""
        found = self._backend.set_state(self._sign(state) + state, token)
        return None if found is None else (self._verified(found[0]), found[1], found[2])

    def _sign(self, state: bytes) -> bytes:
        return hmac.digest(self._key, state, _DIGEST)

    def _verified(self, signed: bytes) -> bytes:
        mac, state = signed[:_MAC_BYTES], signed[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._sign(state)):
            raise RendezvousStateError("the rendezvous state does not have a valid signature of this run")
        return state
