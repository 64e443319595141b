"""Feed: tokens per second of shuffled rows that a training step receives, against loaders over the same memory map.

One file of 100 million random tokens in uint16, with documents of 800 tokens on average, is in the page cache. Every
contender yields batches of 64 rows of 1,024 tokens in random order, and the step does nothing. Contenders take turns;
each is measured with 0 and with 2 worker processes, and the faster counts.

shardwise     the loader of a corpus: windows over shuffled documents, with the position for a checkpoint at each step
packed        the same with packed rows, which have position ids and document ids as well
torch         a DataLoader with shuffle=True over a map-style dataset of the memory map, the rows in fixed windows
datasets      Hugging Face `datasets`: an Arrow table of rows as an iterable dataset with a shuffle buffer, which makes
              batches itself; tokens without targets
streaming     MosaicML's StreamingDataset over MDS shards of the same rows; tokens without targets, which stay uint16

The ratio is to the fastest of the other loaders, the median over rounds; it has a target for windows, since the others
do not pack. `datasets` and `streaming` have less work than the others, and read 20,000 rows.
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import itertools
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from figures import figure
from shardwise.data.corpus import Corpus, MixtureStage
from shardwise.data.corpus_loader import CorpusLoader
from shardwise.data.cursor import Slices
from shardwise.data.mixture import Mixture
from shardwise.data.sources.open import open_source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NUM_TOKENS, QUICK_TOKENS = 100_000_000, 4_000_000
LENGTH, ROWS = 1024, 64
END = 50_256
DOCUMENT = 800
"""Mean length of a document."""
TARGET = 2.0
OTHER_ROWS = 20_000
"""Rows that are converted to the formats of the other libraries."""


class Windows(Dataset):
    """Fixed windows of a memory map, as usual in training scripts."""

    def __init__(self, path: Path) -> None:
        self.tokens = np.memmap(path, dtype=np.uint16, mode="r")

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // LENGTH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * LENGTH
        window = torch.from_numpy(self.tokens[start : start + LENGTH + 1].astype(np.int64))
        return window[:-1], window[1:]


def write_tokens(path: Path, number: int) -> None:
    """Write random tokens with ends of documents."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, END, number).astype(np.uint16)
    tokens[generator.integers(0, number, number // DOCUMENT)] = END
    tokens.tofile(path)


def shardwise_steps(path: Path, workers: int, *, packed: bool) -> Iterator:
    corpus = Corpus(
        sources={"tokens": open_source(path, end_id=END)},
        stages=(MixtureStage(mixture=Mixture(shares=(1,))),),
        length=LENGTH,
        packed=frozenset({"tokens"} if packed else ()),
    )
    slices = Slices(batch_size=ROWS, accumulation=1, dp_rank=0, dp_size=1, length=10**12)
    loader = CorpusLoader(corpus, slices, seed=0, first_step=0, num_steps=10**9, num_workers=workers)
    return loader.steps()


def torch_steps(path: Path, workers: int) -> Iterator:
    return iter(DataLoader(Windows(path), batch_size=ROWS, shuffle=True, drop_last=True, num_workers=workers))


def datasets_steps(path: Path, workers: int) -> Iterator:
    import datasets

    folder = path.with_suffix(".arrow")
    if not folder.exists():
        datasets.disable_progress_bars()
        datasets.Dataset.from_dict({"tokens": first_rows(path).astype(np.int64)}).save_to_disk(folder)
    table = datasets.load_from_disk(folder).with_format("numpy")  # converted to tensors faster than format "torch"
    stream = table.to_iterable_dataset(num_shards=max(1, workers)).shuffle(seed=0, buffer_size=1000).batch(ROWS)
    return iter(DataLoader(stream, batch_size=None, num_workers=workers))


def streaming_steps(path: Path, workers: int) -> Iterator:
    from streaming import MDSWriter, StreamingDataset

    folder = path.with_suffix(".mds")
    if not folder.exists():
        with MDSWriter(out=str(folder), columns={"tokens": f"ndarray:uint16:{LENGTH}"}) as writer:
            for row in first_rows(path):
                writer.write({"tokens": np.array(row)})
    dataset = StreamingDataset(local=str(folder), shuffle=True, batch_size=ROWS)
    return iter(DataLoader(dataset, batch_size=ROWS, num_workers=workers))


def first_rows(path: Path) -> np.ndarray:
    tokens = np.memmap(path, dtype=np.uint16, mode="r")
    number = min(OTHER_ROWS, len(tokens) // LENGTH)
    return tokens[: number * LENGTH].reshape(-1, LENGTH)


def tokens_per_second(steps: Iterator, number: int) -> float:
    """Return the rate of `number` batches after the first, which starts workers and shuffles the first group."""
    next(steps)
    began = time.perf_counter()
    count = sum(1 for _ in itertools.islice(steps, number))
    return count * ROWS * LENGTH / (time.perf_counter() - began)


def measure(path: Path, number: int, rounds: int) -> dict[tuple[str, int], list[float]]:
    """Return the tokens per second of each round by contender and workers; a round has `number` batches."""
    rates: dict[tuple[str, int], list[float]] = {}
    found = contenders(path)
    for turns in (["shardwise", "packed", "torch"], ["datasets"], ["streaming"]):  # the last one leaves threads
        for _, name, workers in itertools.product(range(rounds), found.keys() & turns, (0, 2)):
            rates.setdefault((name, workers), []).append(tokens_per_second(found[name](workers), number))
    return rates


def ratio(rates: dict[tuple[str, int], list[float]], name: str) -> float:
    """Return the median over rounds of the rate of a contender relative to the fastest other loader."""
    medians = {key: statistics.median(found) for key, found in rates.items()}
    mine = max((key for key in rates if key[0] == name), key=medians.__getitem__)
    other = max((key for key in rates if key[0] not in {"shardwise", "packed"}), key=medians.__getitem__)
    return statistics.median(one / two for one, two in zip(rates[mine], rates[other], strict=True))


def contenders(path: Path) -> dict[str, Callable[[int], Iterator]]:
    """Return name -> function of the number of workers, without libraries that cannot be imported."""
    found: dict[str, Callable[[int], Iterator]] = {
        "shardwise": lambda workers: shardwise_steps(path, workers, packed=False),
        "packed": lambda workers: shardwise_steps(path, workers, packed=True),
        "torch": lambda workers: torch_steps(path, workers),
    }
    for name, steps in (("datasets", datasets_steps), ("streaming", streaming_steps)):
        try:
            importlib.import_module(name)
        except (ImportError, RuntimeError) as error:  # the latter from a torchvision that was built for another torch
            print(f"{name} is left out: {error}")
        else:
            found[name] = lambda workers, steps=steps: steps(path, workers)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small file, few batches")
    options = parser.parse_args()
    torch.set_num_threads(1)
    number, rounds = (30, 5) if options.quick else (300, 7)
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)  # after the threads of StreamingDataset, which read it until they end
    path = folder / "tokens.bin"
    write_tokens(path, QUICK_TOKENS if options.quick else NUM_TOKENS)
    rates = measure(path, number, rounds)
    for (name, workers), found in rates.items():
        spread = f"{min(found) / 1e6:.1f} to {max(found) / 1e6:.1f}"
        print(f"{name:10} {workers} workers {statistics.median(found) / 1e6:8.1f} million tokens/s ({spread})")
    figure("data.feed.windows", ratio(rates, "shardwise"), "x-fastest-other", at_least=TARGET)
    figure("data.feed.packed", ratio(rates, "packed"), "x-fastest-other")


if __name__ == "__main__":
    main()
