"""Jobs whose sequences are split: grouped heads, learned positions, and transformers' own model and loss."""

import torch
from torch.utils.data import Dataset

import shardwise as sw

LENGTH = 16


class Rows(Dataset):
    """Tokens and labels of which some do not count, as transformers takes them."""

    def __len__(self):
        return 22

    def __getitem__(self, index):
        tokens = torch.randint(0, 50, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens.masked_fill(torch.arange(LENGTH) < index % 5, -100)}


class Pairs(Rows):
    """The same as inputs and targets."""

    def __getitem__(self, index):
        row = super().__getitem__(index)
        return row["input_ids"], row["labels"].roll(-1)


def make(model, data, loss, **changes):
    return sw.Job(
        model=model,
        data=lambda split: data() if split == "train" else None,
        loss=loss,
        optimizer=sw.adamw(lr=1e-2),
        batch_size=8,
        steps=3,
        clip_norm=0.5,
        **changes,
    )


def decoder(name, **changes):
    return lambda: sw.models.decoder(name, vocab_size=50, context=LENGTH, **changes)


def llama():
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
    )
    return transformers.LlamaForCausalLM(config)


own_loss = sw.losses.returned_by_model(sw.losses.count_next_labels)
one_group = make(decoder("llama-tiny", num_kv_heads=1), Pairs, sw.losses.token_cross_entropy)
two_groups = make(decoder("llama-tiny", num_kv_heads=2), Pairs, sw.losses.token_cross_entropy)
learned = make(decoder("gpt2-tiny"), Pairs, sw.losses.token_cross_entropy)
transformers_llama = make(llama, Rows, sw.losses.next_token, forward=sw.losses.without_labels)
transformers_loss = make(llama, Rows, own_loss)
