"""Data: tokens per second from JSONL to tokens on disk, `shardwise data prepare` beside Hugging Face `datasets`.

Documents are parts of the modules of the Python standard library, in random order up to the requested size; the
tokenizer is a byte-level BPE that is trained on them first. All contenders use the same tokenizer file, the same
`encode_batch_fast`, and as many processes as there are cores, one thread each. They take turns; files of the inputs
are in the page cache.

shardwise      `data prepare`: JSONL to shards with an index and checksums, flushed to disk
map            `Dataset.map(batched=True, num_proc=N)` alone: Arrow in memory maps to an Arrow cache of token lists; the
               conversion of JSONL to Arrow is not timed, nor is anything flushed
load + map     the same with `load_dataset("json")`, which is what a user waits for

The ratio that has a target is the harder one, against `map` alone: the median of the ratios of the rounds. Tokens of
both results are counted and compared. Most of the time is inside the tokenizers library, whichever calls it; the CPU
time of all processes, which another load on the machine changes less, shows what each contender adds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import shutil
import statistics
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import tokenizers

from figures import figure
from shardwise.data.prepare.prepare import data_prepare
from shardwise.hardware.probe import usable_cores

MEGABYTES, QUICK_MEGABYTES = 64, 12
ROUNDS, QUICK_ROUNDS = 5, 5
VOCAB_SIZE = 16_384
TARGET = 1.0


def write_documents(path: Path, num_bytes: int) -> int:
    """Write modules of the standard library, in random order and again and again; return the number of documents."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [module.read_text(errors="replace") for module in modules]
    order = random.Random(0)
    written = count = 0
    with path.open("w") as file:
        while written < num_bytes:
            text = order.choice(texts)
            start = order.randrange(max(1, len(text) // 2))
            file.write(json.dumps({"id": count, "text": text[start : start + order.randrange(200, 12_000)]}) + "\n")
            written = file.seek(0, os.SEEK_CUR)
            count += 1
    return count


def train_tokenizer(documents: Path, path: Path) -> None:
    """Train a byte-level BPE on the first documents."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=["<|endoftext|>"], show_progress=False
    )
    with documents.open() as file:
        model.train_from_iterator((json.loads(line)["text"] for line in file.readlines(4_000_000)), trainer)
    model.save(str(path))


@dataclass(frozen=True)
class Cost:
    """What a contender took."""

    wall_s: float
    cpu_s: float
    """User and system time of this process and of its children that have ended."""

    @classmethod
    def now(cls) -> Cost:
        """Return both clocks."""
        return cls(time.perf_counter(), sum(os.times()[:4]))

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.wall_s - other.wall_s, self.cpu_s - other.cpu_s)


@dataclass(frozen=True)
class Contenders:
    """One input, tokenized by each library; every method returns the cost of each contender and the tokens."""

    folder: Path
    documents: Path
    tokenizer: Path
    processes: int

    def shardwise(self) -> tuple[dict[str, Cost], int]:
        """Prepare a corpus."""
        out = self.folder / "corpus"
        started = Cost.now()
        report = data_prepare([self.documents], out=out, tokenizer=str(self.tokenizer), processes=self.processes)
        cost = Cost.now() - started
        shutil.rmtree(out)
        return {"shardwise": cost}, report.num_tokens - report.num_documents

    def datasets(self) -> tuple[dict[str, Cost], int]:
        """Load and map."""
        import datasets

        datasets.disable_progress_bars()
        cache = self.folder / "cache"
        model = tokenizers.Tokenizer.from_file(str(self.tokenizer))

        def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
            encodings = model.encode_batch_fast(batch["text"], add_special_tokens=False)
            return {"input_ids": [encoding.ids for encoding in encodings]}

        started = Cost.now()
        rows = datasets.load_dataset("json", data_files=str(self.documents), cache_dir=str(cache), split="train")
        loaded = Cost.now()
        mapped = rows.map(encode, batched=True, num_proc=self.processes, remove_columns=rows.column_names)
        ended = Cost.now()
        tokens = sum(len(chunk.flatten()) for chunk in mapped.data.column("input_ids").chunks)
        shutil.rmtree(cache)
        return {"map": ended - loaded, "load + map": ended - started}, tokens


def measure(contenders: Contenders, rounds: int) -> tuple[list[dict[str, Cost]], int]:
    """Return the costs of each round, and the number of tokens, which must be equal."""
    turns = [contenders.shardwise]
    if importlib.util.find_spec("datasets") is None:
        print("datasets is not installed: left out (pip install -r benchmarks/peers.txt)")
    else:
        turns.append(contenders.datasets)
    costs = []
    counts = set()
    for _ in range(rounds):
        random.shuffle(turns)
        costs.append({})
        for turn in turns:
            found, tokens = turn()
            costs[-1].update(found)
            counts.add(tokens)
    if len(counts) != 1:
        raise SystemExit(f"the contenders wrote different numbers of tokens: {sorted(counts)}")
    return costs, counts.pop()


def median_ratio(costs: list[dict[str, Cost]], other: str, attribute: str) -> float:
    """Return how many times as much as shardwise another contender took, by the median of the rounds."""
    return statistics.median(getattr(each[other], attribute) / getattr(each["shardwise"], attribute) for each in costs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small input, at most a minute")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        documents, tokenizer = folder / "documents.jsonl", folder / "tokenizer.json"
        count = write_documents(documents, (QUICK_MEGABYTES if quick else MEGABYTES) * 1_000_000)
        train_tokenizer(documents, tokenizer)
        print(f"{count:,} documents, {documents.stat().st_size / 1e6:.0f} MB")
        contenders = Contenders(folder, documents, tokenizer, usable_cores())
        rounds = QUICK_ROUNDS if quick else ROUNDS
        costs, tokens = measure(contenders, rounds)
    print(f"{tokens:,} tokens, {contenders.processes} processes, {rounds} rounds")
    for contender in sorted(costs[0], reverse=True):
        rates = [tokens / each[contender].wall_s for each in costs]
        cpu_s = statistics.median(each[contender].cpu_s for each in costs)
        spread = f"{min(rates):,.0f} to {max(rates):,.0f}"
        print(f"{contender:<12} {statistics.median(rates):>12,.0f} tokens/s ({spread}), {cpu_s:.2f} s of CPU")
    if "map" not in costs[0]:
        return
    figure("data.prepare.map", median_ratio(costs, "map", "wall_s"), "x-datasets-map", at_least=TARGET)
    figure("data.prepare.load_and_map", median_ratio(costs, "load + map", "wall_s"), "x-datasets-load-and-map")
    figure("data.prepare.map_cpu", median_ratio(costs, "map", "cpu_s"), "x-CPU-of-datasets-map", at_least=TARGET)


if __name__ == "__main__":
    main()
