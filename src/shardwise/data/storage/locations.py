"""Locations of data: a path of this machine, or the URL of an object or folder on object storage.

A URL with a user name, a password or a query string is refused: such parts are often secrets, and locations appear in
reports, errors and journals. Credentials come from the environment and the configuration files of each library.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from shardwise.data.storage.objects import ObjectStore
from shardwise.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]*)://(.*)", re.DOTALL)
_COMMAND = "pipe:"
"""Start of the locations of WebDataset that are commands of a shell."""


@dataclass(frozen=True)
class RemotePath:
    """The URL of an object or a folder, with the operations of pathlib that sources use."""

    scheme: str
    key: PurePosixPath
    """Bucket or host, and the name of the object."""
    store: ObjectStore = field(compare=False, repr=False)

    def __str__(self) -> str:
        # The root of memory:// is an absolute path, which has a slash of its own.
        return f"{self.scheme}://{self.key}"

    def __truediv__(self, name: str) -> RemotePath:
        return self._with(self.key / name)

    @property
    def can_list(self) -> bool:
        """Whether a folder is listed with sizes: web servers have pages at most."""
        return self.scheme not in {"http", "https"}

    def check_writable(self) -> None:
        """Raise DataError if objects of this scheme cannot be written."""
        if not self.can_list:
            raise DataError(
                f"{self.scheme}:// URLs are read-only, got {self}",
                code="data.scheme-read-only",
                fix="pass a URL of s3://, gs:// or another object store",
            )

    @property
    def name(self) -> str:
        """The last part."""
        return self.key.name

    @property
    def stem(self) -> str:
        """The last part without its suffix."""
        return self.key.stem

    @property
    def suffix(self) -> str:
        """The suffix of the last part, with its dot."""
        return self.key.suffix

    @property
    def suffixes(self) -> list[str]:
        """All suffixes of the last part."""
        return self.key.suffixes

    @property
    def parent(self) -> RemotePath:
        """The folder."""
        return self._with(self.key.parent)

    def with_suffix(self, suffix: str) -> RemotePath:
        """Return the URL with another suffix."""
        return self._with(self.key.with_suffix(suffix))

    def _with(self, key: PurePosixPath) -> RemotePath:
        return RemotePath(self.scheme, key, self.store)


Location = Path | RemotePath


def locate_url(text: str) -> RemotePath:
    """Return the location of a URL of object storage; raises DataError for any other text, as `locate` does."""
    check_url(text)
    location = locate(text)
    if isinstance(location, Path):
        raise _not_remote(text)
    return location


def check_url(text: str) -> None:
    """Raise DataError if a text is not a URL, has parts that may be secrets, or names no bucket; needs no package."""
    found = _URL.fullmatch(text)
    if found is None or found[1].lower() == "file":
        raise _not_remote(text)
    _check_parts(found[1].lower(), found[2])


def _not_remote(text: str) -> DataError:
    shown = "the value" if re.search("[@?#]", text) else text  # it may have secrets
    return DataError(
        f"{shown} is not a URL of object storage", code="data.url-invalid", fix="pass a URL such as s3://BUCKET/PATH"
    )


def locate(text: str | Path) -> Location:
    """Return the location of a path or a URL; raises DataError for unknown schemes, credentials and commands."""
    return locate_all([text])[0]


def locate_all(texts: Iterable[str | Path]) -> list[Location]:
    """Return the locations of paths and URLs, which share the connections of their scheme; raises as `locate` does."""
    stores: dict[str, ObjectStore] = {}
    return [_locate(text, stores) for text in texts]


def _locate(text: str | Path, stores: dict[str, ObjectStore]) -> Location:
    if isinstance(text, Path):
        return text
    if text.startswith(_COMMAND):
        raise DataError(
            f"a location starts with {_COMMAND}, but commands are not run",  # the command may contain a secret
            code="data.url-command",
            fix="pass the path or URL of the file that the command prints, such as s3://BUCKET/PATH",
        )
    found = _URL.fullmatch(text)
    if found is None:
        return Path(text)
    scheme, rest = found[1].lower(), found[2]
    _check_parts(scheme, rest)
    if scheme == "file":
        return Path(rest.removeprefix("localhost"))
    store = stores.setdefault(scheme, ObjectStore(scheme))
    store.check_scheme()
    return RemotePath(scheme, PurePosixPath(rest), store)


def _check_parts(scheme: str, rest: str) -> None:
    """Raise DataError if a URL has parts that may be secrets, which the message leaves out, or names no bucket."""
    if scheme != "file" and not rest.strip("/"):
        raise DataError(
            f"{scheme}:// names no bucket or host", code="data.url-incomplete", fix=f"pass {scheme}://BUCKET/PATH"
        )
    authority = rest.partition("/")[0]
    port = authority.partition(":")[2]
    is_port = scheme in {"http", "https"} and port.isdigit()
    if "@" in authority or (":" in authority and not is_port):  # a password may contain a slash
        shown, part = f"{scheme}://***@{rest.rpartition('@')[2].partition('?')[0]}", "a user name or a password"
        if "@" not in rest:
            shown = f"{scheme}://***"
    elif "?" in rest or "#" in rest:
        shown, part = f"{scheme}://{re.split('[?#]', rest)[0]}", "a query string"
    else:
        return
    raise DataError(
        f"the URL {shown} has {part}, which may be secret",
        code="data.url-credentials",
        fix="remove it, and set credentials in the environment or a configuration file, such as AWS_* or ~/.netrc",
    )
