"""Train a Hugging Face model: dict batches, a padded-token loss, metrics, adapters, and a loop of one's own.

shardwise train docs/guides/huggingface.py --nproc 2 --plan fsdp
"""

from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise as sw

PAD = 0


def make_config(width: int = 32) -> LlamaConfig:
    """Return the configuration of a tiny decoder over bytes."""
    size = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaConfig(vocab_size=256, pad_token_id=PAD, **size)


# <data>
class Texts(Dataset):
    """Tokenized texts of unequal lengths: dicts of lists, as a datasets.Dataset returns them."""

    def __init__(self, split):
        lines = [line for line in Path(__file__).read_text().splitlines() if len(line) > 20]
        self.rows = lines[8:] if split == "train" else lines[:8]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        tokens = list(self.rows[index].encode()[:48])  # tokenizer(text)["input_ids"] for your texts
        return {"input_ids": tokens, "labels": tokens}


def pad(rows):
    """Pad rows to one length, as collators of transformers do; padding has no attention and the label -100."""
    tokens, labels = ([torch.tensor(row[key]) for row in rows] for key in ("input_ids", "labels"))
    return {
        "input_ids": pad_sequence(tokens, batch_first=True, padding_value=PAD),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


# </data>


# <metric>
def correct_in_5(output, batch):
    """Return the number of tokens that are among the five highest logits of the position before."""
    labels = batch["labels"][:, 1:]
    best = output.logits[:, :-1].topk(5).indices
    return (best == labels[..., None]).any(-1).sum()  # -100 is never among them


top5 = sw.Metric(sum=correct_in_5, count=sw.losses.count_next_labels)
# </metric>


# <job>
def job(width: int = 32, adapters: int = 0) -> sw.Job:
    """Return the training of a decoder, or of adapters of rank `adapters` beside its frozen weights."""
    return sw.Job(
        model=lambda: LlamaForCausalLM(make_config(width)),  # or AutoModelForCausalLM.from_pretrained(FOLDER)
        data=Texts,
        collate=pad,
        forward=sw.losses.without_labels,  # the model returns its output object, without a loss of its own
        loss=sw.losses.next_token,  # the sum over all tokens but padding, divided by their number in the global batch
        metrics={"accuracy": sw.metrics.next_token_accuracy, "top5": top5},
        lora=sw.Lora(targets=("q_proj", "v_proj"), rank=adapters) if adapters else None,
        optimizer=sw.adamw(lr=1e-3, weight_decay=0.01),
        schedule=sw.schedules.Linear(warmup=0.1),
        clip_norm=1.0,
        batch_size=16,
        epochs=1,
    )


# </job>


def own_loop(world: sw.World, name: str = "fsdp") -> dict[str, torch.Tensor]:
    """Train one epoch in a loop of one's own and return the weights on rank 0; call on every rank."""
    torch.manual_seed(0)
    # <loop>
    plan = sw.Plan.preset(name, world.size)
    train = sw.dataloader(DataLoader(Texts("train"), batch_size=16, collate_fn=pad), plan, world, drop_last=True)
    model = sw.parallelize(LlamaForCausalLM(make_config()), plan, world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in train:
        count = sw.losses.count_next_labels(batch)  # the tokens over which the model averages its loss
        loss = model(**batch).loss * count / train.mean(count)  # without it, a mean of the means of the ranks
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    # </loop>
    return sw.full_state_dict(model)
