"""The small job on rows of tokens that tests of training share: uneven counts, and a last batch that is short."""

import torch

import shardwise as sw


class Sentences(torch.utils.data.Dataset):
    """Token rows of which some count less than others; 22 of them make short last steps in batches of 8."""

    def __len__(self):
        return 22

    def __getitem__(self, index):
        tokens = torch.randint(0, 50, (9,), generator=torch.Generator().manual_seed(index))
        targets = tokens[1:].clone()
        targets[: index % 5] = -100
        return tokens[:-1], targets


def sentences_job(decoder="gpt2-tiny", **changes):
    """Return a job that trains a tiny decoder on sentences, with clipping and decay; `changes` are its fields."""
    fields = {
        "model": lambda: sw.models.decoder(decoder, vocab_size=50, context=16),
        "data": lambda split: Sentences() if split == "train" else None,
        "loss": sw.losses.token_cross_entropy,
        "optimizer": sw.adamw(lr=1e-2, weight_decay=0.1),
        "batch_size": 8,
        "steps": 4,
        "clip_norm": 0.5,
    }
    return sw.Job(**{**fields, **changes})
