"""Board: training speed of one GPU as users get it, against the hand-written compiled loop and peers.

Every contender trains the same model from the same weights on the same global batches, which lie on the GPU already,
with fused AdamW and, unless stated otherwise, bf16 autocast over fp32 weights:

hand-written     the reference: the loop of step_loops.py with model and loss in one torch.compile region
as-it-comes      the plan that `shardwise train` settles on by predictions, without any option; `--tune` lets it measure
                 its candidates first, as `train` does before long jobs
at-its-best      bf16 weights with fp32 copies in the optimizer, bf16 moments, compile = "model", capture = "step"
no-masters       the same without fp32 copies: weights are rounded stochastically
float8           the same with the linear layers of blocks in float8 (shapes of width 1024 or more)
torchao-by-hand  the reference after torchao's convert_to_float8_training of the linear layers of blocks, tensorwise
blocks-fused     bf16 autocast, compile = "blocks", fused_loss (the transformers model only)
accelerate       Accelerator(mixed_precision="bf16") compiled through TorchDynamoPlugin(backend="inductor")
fabric           Fabric(precision="bf16-mixed") and fabric.setup(torch.compile(model))

One contender at a time is in GPU memory. It is built and takes a first turn, in which kernels are compiled with empty
caches (cold) and which counts for nobody; then it takes the measured turns. The reference is measured first and last;
ratios are to the median of both, and the second time gives its first turn with filled caches (warm) in the same
process; `--warm` builds the others twice, too. A contender that fails is reported, and the next one follows.

Model FLOP/s count matrix products and causal attention, forward and backward, without recomputation and without the
input embedding: 6 x parameters x tokens + 6 x layers x width x context x tokens. The share is of the bf16 matrix rate
that this GPU reaches at 8192 x 8192 x 8192 in the same run, for float8 as well.

`--caches FOLDER` keeps the caches of the compiler, so that a later command measures sooner; its first turns are warm.
`--json FILE` appends one line per contender as soon as it is measured; `--table FILE...` writes the table of such files
into docs/results/board.md. Without a GPU, `--quick` tries the script on tiny shapes; its figures mean nothing there.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import importlib.util
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import board_table
import shardwise as sw
from board_loops import MODULES, REFERENCE, Board, TransformersBoard, num_compiled_graphs, num_parameters
from board_loops import transformers_job as qwen_job
from board_table import EAGER, Record
from shapes import GPT2, LLAMA_1B, LLAMA_3B, QWEN, WIDE
from shardwise.job import load_job, refer
from shardwise.planner.settle import Tuning
from step import TINY, mlp_job, text_job, token_loss
from step_loops import Loop, forget

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.models import DecoderConfig

PEERS = ("accelerate", "fabric")
PLANS = ("as-it-comes", "at-its-best", "no-masters")
FLOAT8 = ("float8", "torchao-by-hand")
SHAPES: dict[str, tuple[DecoderConfig, int, tuple[str, ...]]] = {
    "gpt2-124m": (GPT2, 64, (*PLANS, *PEERS)),
    "llama-1.2b": (LLAMA_1B, 8, (*PLANS, *FLOAT8, *PEERS)),
    "llama-3b": (LLAMA_3B, 4, (*PLANS, *FLOAT8)),
    "width-4096": (WIDE, 2, (*PLANS, *FLOAT8)),
    "transformers": (QWEN, 16, ("as-it-comes", "blocks-fused", "at-its-best")),
}
"""Name -> sizes, rows of a batch, and the contenders that are measured without --contenders."""
NAMES = (*PLANS, "float8", "torchao-by-hand", "blocks-fused", *PEERS)
LEAST_FLOAT8_WIDTH = 1024


def job(shape: str = "llama-1.2b") -> sw.Job:
    """Return the long job of one shape, which the process that measures plans loads from this file."""
    config, rows, _ = SHAPES[shape]
    return (qwen_job if shape == "transformers" else text_job)(config, rows, 10_000_000)


def matmul_rate(device: torch.device) -> float:
    """Return the FLOP/s of a large bf16 matrix product, the median of twenty."""
    size = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(22):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / statistics.median(seconds[2:])


def step_flops(config: DecoderConfig, rows: int, parameters: int) -> float:
    """Return the model FLOPs of one step, by the formula above; a tied embedding counts as the output projection."""
    tokens = rows * config.context
    embedding = 0 if config.tie_head else config.vocab_size * config.width
    positions = config.context * config.width if config.family == "gpt2" else 0
    return 6 * tokens * (parameters - embedding - positions + config.num_layers * config.width * config.context)


class Session:
    """One command: its options, its deadline, and the caches of the compiler."""

    def __init__(self, options: argparse.Namespace, world: sw.World, folder: Path) -> None:
        self.options, self.world, self.device, self._folder = options, world, world.device, folder
        self.on_gpu = world.device.type == "cuda"
        self._deadline = time.monotonic() + options.limit_s
        self.rounds = 2 if options.quick else options.rounds
        self.run = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        self.rate = matmul_rate(world.device)
        self.device_name = torch.cuda.get_device_name() if self.on_gpu else "CPU"

    def is_over(self, shape: str, name: str) -> bool:
        """Return whether the time is up, and print what is left out."""
        late = time.monotonic() > self._deadline
        if late:
            print(f"{shape}: {name} left out, because --limit-s {self.options.limit_s:g} has passed")
        return late

    def use_caches(self, shape: str, name: str) -> bool:
        """Give a contender its own caches of the compiler, and return whether they are filled.

        So its first turn does not depend on the order of contenders.
        """
        folder = self._folder / shape / name
        is_filled = folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        if self.on_gpu:  # on a CPU, a new folder costs a compilation of torch's headers
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
            os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
        return is_filled

    def tune(self, shape: str, race: Board) -> None:
        """Let auto measure its candidates before the first turn, which would count its seconds."""
        reference = refer(f"{__file__}:job", {"shape": shape})
        folder = self._folder / "races"
        race.long_job = load_job(reference)
        race.tuning = Tuning(reference=reference, note=print, device=str(self.device), folder=folder)
        began = time.perf_counter()
        try:
            plan = race.auto_plan
        except Exception as error:  # noqa: BLE001 - as-it-comes fails in the same way, and is reported there
            print(f"{shape}: --plan auto failed: {describe(error)}")
        else:
            seconds = time.perf_counter() - began
            print(f"{shape}: --plan auto chose compile = {plan.compile} after {seconds:.0f} s")

    def measure(self, shape: str, race: Board, setup: Callable, blank: Record, *, size: int) -> Record:
        """Build one contender, let it take its turns, free it, and return its record; errors become part of it."""
        name = blank.contender
        is_warm = self.use_caches(shape, name)
        try:
            found = self._turns(race, setup, blank, size=size, is_warm=is_warm)
        except Exception as error:  # noqa: BLE001 - a contender that fails must not take the others' figures along
            found = dataclasses.replace(blank, error=describe(error))
            print(f"  {name} failed: {found.error}")
        forget(self.device)
        board_table.append(self.options.json, found)
        return found

    def _turns(self, race: Board, setup: Callable, blank: Record, *, size: int, is_warm: bool) -> Record:
        graphs = num_compiled_graphs()
        loop = Loop(setup)
        first_s = first_turn(loop, race, size)
        note = ""
        if blank.contender in PEERS and num_compiled_graphs() == graphs:
            note = "its compile option has no effect: torch.compile made no graph"
        rates = []
        for number in range(1, self.rounds + 1):
            seconds = loop.turn(race.batches[number * size : (number + 1) * size], self.device)
            rates.append(size / seconds)
        losses = tuple(float(loss) for loss in loop.losses)
        peak_bytes = loop.peak_bytes
        del loop  # before a second one is built
        warm_s = first_s if is_warm else None
        if self.options.warm and blank.contender != REFERENCE:
            forget(self.device)
            warm_s = first_turn(Loop(setup), race, size)
        tokens = statistics.median(rates) * blank.rows * blank.context
        print(
            f"  {blank.contender}: {tokens:,.0f} tokens/s, {peak_bytes / 2**30:.2f} GiB, loss {losses[-1]:.4f},"
            f" first turn {first_s:.1f} s {'warm' if is_warm else 'cold'}{note and '; '}{note}"
        )
        return dataclasses.replace(
            blank,
            rates=tuple(rates),
            losses=losses,
            peak_bytes=peak_bytes,
            cold_s=None if is_warm else first_s,
            warm_s=warm_s,
            note=note,
        )

    def race(self, shape: str, race: Board, setups: dict[str, Callable], blank: Record, *, size: int) -> None:
        """Measure the reference, the contenders, and the reference once more; print table and figures."""
        records = []
        for number, name in enumerate([*setups, REFERENCE]):
            is_again = number == len(setups)
            if self.is_over(shape, name) or (is_again and len(records) < 2):
                continue
            one = dataclasses.replace(blank, contender=name)
            records.append(self.measure(shape, race, setups[name], one, size=size))
        board_table.show(shape, board_table.rows_of(records))

    def blank(self, shape: str, parameters: int, rows: int, context: int, flops: float) -> Record:
        """Return a record of this command without a contender."""
        return Record(
            run=self.run,
            device=self.device_name,
            torch=torch.__version__,
            matmul_flops=self.rate,
            shape=shape,
            contender="",
            num_parameters=parameters,
            rows=rows,
            context=context,
            flops=flops,
        )


def describe(error: Exception) -> str:
    """Return the type and the first line of an error."""
    first = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {first}"[:300]


def first_turn(loop: Loop, race: Board, size: int) -> float:
    """Return the seconds in which a contender is built and takes its first turn."""
    began = time.perf_counter()
    loop.turn(race.batches[:size], race.device)
    return time.perf_counter() - began


def is_installed(module: str, what: str) -> bool:
    """Return whether a package is installed, and print what is left out without it."""
    found = importlib.util.find_spec(module) is not None
    if not found:
        print(f"{what} left out: {module} is not installed")
    return found


def race_shape(session: Session, shape: str) -> None:
    """Race one decoder, or the transformers model."""
    of_transformers = shape == "transformers"
    if of_transformers and not is_installed("transformers", shape):
        return
    config, rows, usual = SHAPES[shape]
    wanted = session.options.contenders or usual
    if config.width < LEAST_FLOAT8_WIDTH:
        wanted = [name for name in wanted if name not in FLOAT8]
    if not session.on_gpu:
        config, rows = dataclasses.replace(TINY, tie_head=config.tie_head), 2
    size = 5
    build, kind = (qwen_job, TransformersBoard) if of_transformers else (text_job, Board)
    short = build(config, rows, size * (session.rounds + 1))
    race = kind(short, session.world, token_loss)
    if session.options.tune and session.on_gpu:
        session.tune(shape, race)
    parameters = num_parameters(short)
    print(f"{shape}: {parameters / 1e9:.2f} billion parameters, {rows} x {config.context} tokens")
    names = [name for name in wanted if name not in MODULES or is_installed(MODULES[name], f"{shape}: {name}")]
    found = race.contenders()
    setups = {name: found[name] for name in (REFERENCE, *names)}
    blank = session.blank(shape, parameters, rows, config.context, step_flops(config, rows, parameters))
    session.race(shape, race, setups, blank, size=size)


def race_launch_bound(session: Session) -> None:
    """A model whose kernels are shorter than their launches, against the eager hand-written loop."""
    size = 20
    short = mlp_job(size * (session.rounds + 1))
    race = Board(short, session.world, torch.nn.functional.cross_entropy)
    setups = {REFERENCE: race.hand_written, "as-it-comes": race.as_it_comes}
    parameters = num_parameters(short)
    blank = session.blank(EAGER, parameters, short.batch_size, 1, 6 * parameters * short.batch_size)
    session.race(EAGER, race, setups, blank, size=size)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds; tiny shapes without a GPU")
    parser.add_argument("--rounds", type=int, default=4, help="measured turns of five steps")
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES, EAGER], help="default: all")
    parser.add_argument("--contenders", nargs="+", choices=NAMES, help="beside the reference; default: by shape")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="seconds after which no contender is built")
    parser.add_argument("--warm", action="store_true", help="build contenders twice, for the warm first turn")
    parser.add_argument("--caches", type=Path, help="folder of the compiler's caches; default: a temporary one")
    parser.add_argument("--tune", action="store_true", help="as-it-comes measures its candidates, one to two minutes")
    parser.add_argument("--json", type=Path, help="append one line per contender to this file")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="write the table of files of --json")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    if options.table:
        board_table.write_page(board_table.read(options.table))
        return
    if not torch.cuda.is_available() and not options.quick:
        print("no CUDA device: the board is measured on a GPU only (--quick tries the script on the CPU)")
        return
    sys.stdout.reconfigure(line_buffering=True)
    random.seed(0)
    torch.set_float32_matmul_precision("high")
    with tempfile.TemporaryDirectory() as folder, sw.world() as world:
        session = Session(options, world, options.caches or Path(folder))
        print(f"{session.device_name}, torch {torch.__version__}, {session.rate / 1e12:.0f} TFLOP/s")
        # Without a GPU, all decoders have the same tiny shape.
        shapes = (*SHAPES, EAGER) if session.on_gpu else ("llama-1.2b", "transformers", EAGER)
        for shape in options.shapes or shapes:
            if session.is_over(shape, "every contender"):
                continue
            try:
                race_launch_bound(session) if shape == EAGER else race_shape(session, shape)
            except Exception as error:  # noqa: BLE001 - as above, for what contenders have in common
                print(f"{shape} failed: {describe(error)}")
            forget(world.device)


if __name__ == "__main__":
    main()
