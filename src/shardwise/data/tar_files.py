"""WebDataset-style tar shards as a map-style dataset (`sw.datasets.webdataset`): samples decoded by their suffixes.

WebDataset reads shards as streams, whose position depends on ranks and shuffle buffers. Here an index of the headers
(`tar_index.py`) gives each sample a number, so the keyed permutation of the loaders and exact resume hold, as for any
dataset with a length. A sample costs one read of a range of bytes, since its members follow each other in the file.
"""

from __future__ import annotations

import io
import re
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from torch.utils.data import Dataset

from shardwise.data.images import SUFFIXES, make_decoder, require_pillow
from shardwise.data.storage.files import is_folder, list_files, open_ranges, size_and_version
from shardwise.data.storage.locations import locate, locate_all
from shardwise.data.tar_index import member_name, open_tar_index
from shardwise.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from shardwise.data.images import Augment, ImageDecoder, PerChannel
    from shardwise.data.storage.files import LocalFile
    from shardwise.data.storage.locations import Location
    from shardwise.data.storage.remote_file import RemoteFile
    from shardwise.data.tar_index import TarIndex

    Shards = str | Path | Sequence[str | Path]
    """A path or URL of a tar file, of many as `shard-{000..099}.tar`, or of a folder; or a list of these."""

_IMAGES = frozenset(suffix.removeprefix(".") for suffix in SUFFIXES)
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MAX_OPEN = 64
"""Shards that a process keeps open."""
_GAP_BYTES = 2**16
"""Bytes between the fields of a sample, of headers and other members, up to which one read returns all fields."""
_INDEX_THREADS = 8
"""Shards whose headers are read at the same time, so that latencies of storage do not add up."""


class TarSamples(Dataset[tuple[Any, ...]]):
    """The samples of tar shards, in the order of the shards; items are tuples of decoded fields."""

    def __init__(self, shards: Sequence[Location], fields: Sequence[Sequence[str]], decoder: ImageDecoder) -> None:
        """Open the index of each shard; raises DataError if a sample lacks all suffixes of a field."""
        self._shards, self._fields, self._decoder = shards, fields, decoder
        with ThreadPoolExecutor(_INDEX_THREADS) as pool:
            indexes = list(pool.map(open_tar_index, shards))
        self._versions = [(index.size, index.version) for index in indexes]
        self._ends = np.cumsum([index.num_samples for index in indexes], dtype=np.int64)
        """Number of samples up to the end of each shard."""
        places = [_places(shard, index, fields) for shard, index in zip(shards, indexes, strict=True)]
        self._places = np.concatenate(places)
        """[samples, fields, 3]: first byte and size of the content, and the position of its suffix in the field."""
        self._open: OrderedDict[int, LocalFile | RemoteFile] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is out of range for {len(self)} samples")
        number = int(np.searchsorted(self._ends, index, side="right"))
        places: list[list[int]] = self._places[index].tolist()
        contents = self._read(number, [(start, start + size) for start, size, _ in places])
        decoded = []
        for suffixes, content, (start, _, chosen) in zip(self._fields, contents, places, strict=True):
            decoded.append(
                decode_field(suffixes[chosen], content, self._decoder, _TarMember(self._shards[number], start))
            )
        return tuple(decoded)

    def _read(self, number: int, ranges: list[tuple[int, int]]) -> list[bytes]:
        """Return ranges of bytes of a shard, by one read if they are near to each other."""
        first, last = min(start for start, _ in ranges), max(stop for _, stop in ranges)
        if last - first > sum(stop - start for start, stop in ranges) + _GAP_BYTES:
            return [self._read_range(number, start, stop) for start, stop in ranges]
        content = self._read_range(number, first, last)
        return [content[start - first : stop - first] for start, stop in ranges]

    def _read_range(self, number: int, start: int, stop: int) -> bytes:
        content = self._file(number).read(start, stop)
        if len(content) != stop - start:
            raise _changed(self._shards[number])
        return content.tobytes()

    def _file(self, number: int) -> LocalFile | RemoteFile:
        if number not in self._open:
            if len(self._open) >= _MAX_OPEN:
                self._open.popitem(last=False)
            shard = self._shards[number]
            if size_and_version(shard) != self._versions[number]:
                raise _changed(shard)
            self._open[number] = open_ranges(shard)
        self._open.move_to_end(number)
        return self._open[number]


def webdataset(
    train: Shards,
    *,
    fields: str | Sequence[str] = ("jpg;jpeg;png;webp", "cls"),
    test: Shards | None = None,
    size: int = 224,
    channels: int = 3,
    mean: PerChannel = None,
    std: PerChannel = None,
    augment: Augment = False,
) -> Callable[[str], TarSamples | None]:
    """Return a factory of map-style datasets from WebDataset-style tar shards, which may be on object storage.

    `train` and `test` are a path or URL of a tar file, of many as `shard-{000..099}.tar`, or of a folder with `.tar`
    files; or a list of these. Members that share their name before the first dot are one sample. A sample becomes the
    tuple of its `fields`: suffixes, of which the first that exists counts if several are joined by `;`. Images become
    float32 tensors by the other arguments, as in `images`; `.cls` an int64 scalar, `.npy` a tensor, `.json` its values
    and `.txt` a string. Requires `[images]` if a field is an image.
    """
    names = fields.split() if isinstance(fields, str) else fields
    alternatives = tuple(tuple(name.lower().split(";")) for name in names)
    _check_fields(alternatives)
    return _TarData(
        train=_locations(train),
        test=None if test is None else _locations(test),
        fields=alternatives,
        decoder=make_decoder(size, channels, mean, std, augment=augment),
    )


@dataclass(frozen=True, kw_only=True)
class _TarData:
    """Maps a split to its dataset; the arguments of `webdataset`."""

    train: Sequence[Location]
    test: Sequence[Location] | None
    fields: Sequence[Sequence[str]]
    decoder: ImageDecoder

    def __call__(self, split: str) -> TarSamples | None:
        locations, decoder = self.train, self.decoder
        if split != "train":
            if self.test is None:
                return None
            locations, decoder = self.test, replace(self.decoder, augment=False)
        if any(_kind(suffix) in _IMAGES for suffixes in self.fields for suffix in suffixes):
            require_pillow()
        dataset = TarSamples(_find_shards(locations), self.fields, decoder)
        if not len(dataset):
            raise DataError(
                f"the {split} shards have no samples, such as {locations[0]}",
                code="data.no-samples",
                fix="pass tar files with members such as 0001.jpg and 0001.cls",
            )
        return dataset


# Shards and the places of fields in them.


def _locations(given: Shards) -> list[Location]:
    """Return the locations of paths and URLs, with numbers for braces; raises DataError for URLs with secrets."""
    texts = [given] if isinstance(given, str | Path) else given
    expanded: list[str] = []
    for text in map(str, texts):
        locate(text)  # refuses secrets before another error names the pattern
        expanded += expand_braces(text)
    if not expanded:
        raise DataError("the list of tar shards is empty", code="data.no-input", fix="pass at least one tar file")
    return locate_all(expanded)


def expand_braces(text: str) -> list[str]:
    """Return a text for each number of each `{first..last}`, with the zeros of the first number."""
    found = _BRACES.search(text)
    if found is None:
        return [text]
    first, last = found[1], found[2]
    if int(first) > int(last):
        raise DataError(
            f"{found[0]} in {text} contains no number", code="data.shard-pattern-invalid", fix="write {first..last}"
        )
    rest = expand_braces(text[found.end() :])
    numbers = [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return [text[: found.start()] + number + end for number in numbers for end in rest]


def _find_shards(locations: Sequence[Location]) -> list[Location]:
    """Return the tar files at locations; folders stand for their tar files, by name."""
    shards: list[Location] = []
    for location in locations:
        if location.suffix == ".tar" or not is_folder(location):  # a request per shard on object storage
            shards.append(location)
            continue
        names = list_files(location, (".tar",))
        if not names:
            raise DataError(
                f"folder {location} has no .tar file",
                code="data.no-input",
                fix="pass a folder with tar shards, or sw.datasets.images for a folder of images",
            )
        shards += [location / name for name in names]
    return shards


def _places(shard: Location, index: TarIndex, fields: Sequence[Sequence[str]]) -> NDArray[np.int64]:
    """Return [samples, fields, 3]: where each field of each sample is; raises DataError if a sample lacks a field."""
    places = np.full((index.num_samples, len(fields), 3), -1, dtype=np.int64)
    for number, suffixes in enumerate(fields):
        column = places[:, number]
        for choice in reversed(range(len(suffixes))):  # earlier suffixes replace later ones
            if suffixes[choice] in index.suffixes:
                chosen = index.suffix_codes == index.suffixes.index(suffixes[choice])
                rows = index.samples[chosen]
                column[rows, 0], column[rows, 1] = index.starts[chosen], index.num_bytes[chosen]
                column[rows, 2] = choice
        without = np.flatnonzero(column[:, 2] < 0)
        if len(without):
            sample = int(without[0])
            first = int(index.starts[index.samples == sample][0])
            raise DataError(
                f"the sample of {_TarMember(shard, first)} has no field {';'.join(suffixes)}",
                code="data.field-missing",
                fix=f"pass fields= from its suffixes {', '.join(index.suffixes_of(sample))}, or complete the sample",
            )
    return places


@dataclass(frozen=True)
class _TarMember:
    """A member of a tar file in an error, whose name is read only for that."""

    shard: Location
    start: int

    def __str__(self) -> str:
        return f"{member_name(self.shard, self.start)} in {self.shard}"


def _changed(shard: Location) -> DataError:
    return DataError(
        f"tar file {shard} has changed since its index was read",
        code="data.shard-changed",
        fix="run the command again when nothing writes to it",
    )


# Fields.


def _kind(suffix: str) -> str:
    """Return the part of a suffix that determines how a field is decoded: that of `seg.png` is `png`."""
    return suffix.rpartition(".")[2]


def decode_field(suffix: str, content: bytes, decoder: ImageDecoder, place: object) -> Any:
    """Return the value of a member; raises DataError with its `place` if it is damaged."""
    kind = _kind(suffix)
    if kind in _IMAGES:
        return decoder.decode(content, place)
    try:
        return _DECODERS[kind](content)
    except (ValueError, TypeError, EOFError, msgspec.MsgspecError) as error:
        raise DataError(
            f"{place} cannot be decoded as {kind} ({error})", code="data.field-invalid", fix="write it again"
        ) from None


def _decode_npy(content: bytes) -> torch.Tensor:
    return torch.from_numpy(np.load(io.BytesIO(content), allow_pickle=False))


_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "cls": lambda content: torch.tensor(int(content)),
    "json": msgspec.json.decode,
    "npy": _decode_npy,
    "txt": bytes.decode,
}


def _check_fields(fields: Sequence[Sequence[str]]) -> None:
    known = _IMAGES | _DECODERS.keys()
    for suffix in (suffix for suffixes in fields for suffix in suffixes):
        if _kind(suffix) not in known:
            raise DataError(
                f"field {suffix!r} has no decoder",
                code="data.field-unknown",
                fix=f"choose one of {', '.join(sorted(known))}",
            )
    if not fields:
        raise DataError("fields is empty", code="data.field-unknown", fix='pass fields=("jpg;png", "cls")')
