"""torch's rendezvous with its state signed: torch keeps that state in the store as a pickle, and loads what is there.

Whoever can write to the store could have every node run code by a pickle of their own. So each node signs what it
writes with a key that only those have who know the secret of the run, and loads nothing that is not signed.
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
    """Keeps the state in another backend, each time with its signature before it."""

    def __init__(self, backend: RendezvousBackend, key: str) -> None:
        self._backend = backend
        self._key = key.encode()

    @property
    def name(self) -> str:
        """Name of the backend that holds the state."""
        return self._backend.name

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state and its token, None when there is none; RendezvousStateError when it is not signed."""
        found = self._backend.get_state()
        return None if found is None else (self._verified(found[0]), found[1])

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Set the state if `token` is that of the present one; return what is there then, and whether it is ours."""
        found = self._backend.set_state(self._sign(state) + state, token)
        return None if found is None else (self._verified(found[0]), found[1], found[2])

    def _sign(self, state: bytes) -> bytes:
        return hmac.digest(self._key, state, _DIGEST)

    def _verified(self, signed: bytes) -> bytes:
        mac, state = signed[:_MAC_BYTES], signed[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._sign(state)):
            raise RendezvousStateError("the state in the store was not written by a node of this run")
        return state
