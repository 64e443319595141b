"""ByT5, a Transformer that reads bytes, learns to fill gaps in Python code with plain PyTorch DDP.

    torchrun --nproc_per_node=2 train_byt5_ddp.py

The text is the Python standard library's own sources and the weights start random, so nothing is downloaded.
The default is a tiny model for two CPU processes; --size small is the shape of google/byt5-small.
"""

import argparse
import os
import random
import sysconfig
from itertools import count, islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

try:
    from transformers import T5Config, T5ForConditionalGeneration
except ImportError:
    raise SystemExit("train_byt5_ddp.py needs transformers: pip install transformers") from None

# ByT5's vocabulary of 384: padding, end, unknown, the 256 bytes, then 125 marks for gaps.
PAD, END, FIRST_BYTE, FIRST_GAP = 0, 1, 3, 259
VOCABULARY = 384

SIZES = {
    "tiny": {
        "d_model": 128,
        "d_ff": 256,
        "d_kv": 32,
        "num_heads": 4,
        "num_layers": 3,
        "num_decoder_layers": 1,
    },
    "small": {
        "d_model": 1472,
        "d_ff": 3584,
        "d_kv": 64,
        "num_heads": 6,
        "num_layers": 12,
        "num_decoder_layers": 4,
    },
}


class Gaps(Dataset):
    """Pieces of text with a gap: item i is (what the encoder reads, what the decoder must write), both int64.

    Which bytes are hidden depends on i alone, so every world size trains on the same samples.
    """

    def __init__(self, text: bytes, piece: int = 64, gap: int = 8) -> None:
        self.text, self.piece, self.gap = text, piece, gap

    def __len__(self) -> int:
        return len(self.text) // self.piece

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        piece = self.text[index * self.piece : (index + 1) * self.piece]
        start = random.Random(index).randrange(self.piece - self.gap)
        before, hidden, after = piece[:start], piece[start : start + self.gap], piece[start + self.gap :]
        seen = [*tokens(before), FIRST_GAP, *tokens(after), END]
        wanted = [FIRST_GAP, *tokens(hidden), FIRST_GAP + 1, END]
        return torch.tensor(seen), torch.tensor(wanted)


def tokens(text: bytes) -> list[int]:
    """Return ByT5's token ids of `text`: each byte plus 3."""
    return [byte + FIRST_BYTE for byte in text]


def standard_library(num_bytes: int = 1_000_000) -> bytes:
    """Return the first bytes of the Python sources that came with this interpreter."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return b"".join(file.read_bytes() for file in files)[:num_bytes]


def byt5(size: str) -> T5ForConditionalGeneration:
    """Return an untrained ByT5 of the named size."""
    config = T5Config(
        vocab_size=VOCABULARY,
        pad_token_id=PAD,
        eos_token_id=END,
        decoder_start_token_id=PAD,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        **SIZES[size],
    )
    model = T5ForConditionalGeneration(config)
    # T5 draws its output layer with variance 1, for a first loss above 20. Guessing costs ln 384 = 5.95.
    torch.nn.init.normal_(model.lm_head.weight, std=config.d_model**-0.5)
    return model


def start_process_group() -> torch.device:
    """Join the process group that torchrun describes, and return this rank's device."""
    if "RANK" not in os.environ:
        raise SystemExit("start it by torchrun --nproc_per_node=2 train_byt5_ddp.py")
    if torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])):
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def endless(loader: DataLoader, sampler: DistributedSampler):
    """Yield batches epoch after epoch, each epoch in an order of its own."""
    for epoch in count():
        sampler.set_epoch(epoch)
        yield from loader


def mean_over_ranks(value: torch.Tensor) -> float:
    """Return the mean of one number over all ranks (all-reduces)."""
    value = value.clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def train(options: argparse.Namespace, device: torch.device) -> None:
    """Train for `options.steps` steps, rank 0 printing the loss (DDP all-reduces in every step)."""
    dataset = Gaps(standard_library())
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, options.batch_size, sampler=sampler, drop_last=True)

    device_ids = [device.index] if device.type == "cuda" else None
    model = DistributedDataParallel(byt5(options.size).to(device), device_ids=device_ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)

    model.train()
    window = torch.zeros((), device=device)
    for step, batch in enumerate(islice(endless(loader, sampler), options.steps), start=1):
        seen, wanted = (part.to(device) for part in batch)
        # The model shifts the labels for its decoder and returns the mean loss. Every label counts and all
        # ranks have equally many, so DDP's mean over ranks is the mean over the global batch.
        loss = model(input_ids=seen, labels=wanted).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        window += loss.detach() / options.report
        if step % options.report == 0:
            mean = mean_over_ranks(window)
            window.zero_()
            if dist.get_rank() == 0:
                print(f"step {step} of {options.steps}: loss {mean:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="ByT5 filling gaps in Python code with plain PyTorch DDP")
    parser.add_argument("--size", choices=SIZES, default="tiny", help="small is the shape of google/byt5-small")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=16, help="samples per step of each process")
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--report", type=int, default=10, help="print the mean loss of this many steps")
    options = parser.parse_args()
    device = start_process_group()
    train(options, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
