"""Torch's key-value stores, which torch exports at run time but not to type checkers."""

from torch.distributed import (  # type: ignore[attr-defined]
    FileStore,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)

__all__ = ["FileStore", "HashStore", "PrefixStore", "Store", "TCPStore"]
