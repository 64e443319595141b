"""Jobs with adapters, small enough to be verified in a fraction of a second."""

import dataclasses

from parity.jobs import decoder

import shardwise as sw


def adapted(
    family="gpt2-tiny", targets=("attn.qkv", "attn.out", "mlp.up", "mlp.down", "head"), num_layers=2, **options
):
    size = {"vocab_size": 32, "width": 16, "num_layers": num_layers, "num_heads": 4, "context": 8}
    if "head" in targets:
        size["tie_head"] = False
    return decoder(
        model=lambda: sw.models.decoder(family, **size),
        lora=sw.Lora(rank=3, alpha=6, targets=targets, **options),
    )


job = adapted()
"""Adapters on columns, rows and a head."""
untied = adapted("llama-tiny")
deep = adapted("llama-tiny", num_layers=4)
some = adapted(targets=("blocks.*.attn.qkv", "mlp.down"))
dropping = adapted(dropout=0.1)
keyed = dataclasses.replace(adapted(targets=("attn.qkv", "head"), dropout=0.1), masks="keyed")
"""Adapters beside columns only, whose inputs are whole under tensor parallelism."""


def conv1d():
    """GPT-2 as transformers has it: linear modules whose weights lie the other way round."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=4, n_positions=8))


transposed = decoder(
    model=conv1d,
    forward=lambda model, batch: model(batch[0], use_cache=False).logits,
    lora=sw.Lora(rank=3, targets=("c_attn", "c_fc", "c_proj")),
    tensor_rules={"transformer.h.*.mlp.c_fc": "column", "transformer.h.*.mlp.c_proj": "row"},
)
