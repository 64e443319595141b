"""Published runs with tensor and pipeline parallelism: Megatron-LM, NeMo, nanotron and Llama 3.

Sources stand at each table. Two were not compared with their papers: settings and seconds with full recompute of
Korthikanti et al. 2022 are from memory, and the rows of Llama 3 from secondary pages.
Megatron's distributed optimizer overlaps reductions and gathers with compute, as ZeRO-2 does here; its kernels of
norms, activations and rotations are fused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plan_published_rows import (
    LLAMA2_7B,
    LLAMA2_13B,
    LLAMA2_70B,
    LLAMA3_8B,
    LLAMA3_70B,
    LLAMA3_405B,
    Row,
    gpt,
    llama,
)
from shardwise.layout import Layout

if TYPE_CHECKING:
    from shardwise.plans.catalogue import DecoderConfig

GPT_175B = gpt(12_288, 96, 96)


def _stages(virtual: int) -> str:
    return "interleaved_1f1b" if virtual > 1 else "1f1b"


# NeMo 24.07 to 25.11 on DGX H100, fp8 by Transformer Engine, cuDNN's attention, overlapped tensor parallelism:
# github.com/NVIDIA/NeMo docs/source/performance/performance_summary.md (24.07), github.com/NVIDIA-NeMo/Megatron-Bridge
# docs/performance-summary.md (25.11, DGX H100 and B200). Nemotron's MLP has no gate, so GPT's shape stands for it.

_NEMO = (
    # model, GPUs, batch, micro-batch, T, tp, pp, cp, virtual stages, tokens/s a GPU
    ("GPT3-5B", gpt(4096, 24, 32), 64, 2048, 4, 2048, 1, 1, 1, 1, 22_521),
    ("GPT3-20B", gpt(6144, 44, 48), 64, 256, 2, 2048, 2, 1, 1, 1, 5851),
    ("GPT3-175B", GPT_175B, 128, 256, 1, 2048, 4, 8, 1, 6, 726),
    ("GPT3-175B", GPT_175B, 512, 2048, 2, 2048, 4, 8, 1, 6, 782),
    ("LLAMA2-7B", LLAMA2_7B, 8, 128, 1, 4096, 1, 1, 1, 1, 16_847),
    ("LLAMA2-13B", LLAMA2_13B, 16, 128, 1, 4096, 1, 4, 1, 10, 8646),
    ("LLAMA2-70B", LLAMA2_70B, 64, 128, 1, 4096, 4, 4, 1, 20, 1707),
    ("Nemotron-8B", gpt(4096, 32, 32, 256_000), 64, 256, 4, 4096, 2, 1, 1, 1, 12_701),
    ("Nemotron-22B", gpt(6144, 40, 48, 256_000), 64, 256, 2, 4096, 2, 4, 1, 10, 4256),
    ("LLAMA3-8B", LLAMA3_8B, 8, 128, 1, 8192, 1, 1, 2, 1, 12_036),
    ("LLAMA3-70B", LLAMA3_70B, 64, 128, 1, 8192, 4, 4, 2, 5, 1533),
    ("LLAMA2-7B, SFT", LLAMA2_7B, 8, 32, 1, 4096, 1, 1, 1, 1, 17_120),
    ("LLAMA2-13B, SFT", LLAMA2_13B, 8, 32, 1, 4096, 1, 4, 1, 10, 9741),
    ("LLAMA2-70B, SFT", LLAMA2_70B, 16, 32, 1, 4096, 4, 4, 1, 20, 1833),
    ("LLAMA3-8B, 25.11", LLAMA3_8B, 8, 128, 1, 8192, 1, 1, 1, 1, 14_451),
    ("LLAMA3-70B, 25.11", LLAMA3_70B, 64, 128, 1, 8192, 4, 8, 1, 5, 1602),
    ("LLAMA3-405B, 25.11", LLAMA3_405B, 1024, 512, 1, 8192, 8, 8, 2, 8, 292),
)


_NEMO_BLIND = (
    ("LLAMA3-8B, 25.11", LLAMA3_8B, 8, 128, 2, 8192, 1, 1, 1, 1, 30_624),
    ("LLAMA3-405B, 25.11", LLAMA3_405B, 128, 64, 1, 8192, 4, 8, 2, 8, 661),
    ("LLAMA3-70B, 25.02", LLAMA3_70B, 64, 128, 1, 8192, 2, 4, 2, 5, 3062),
    ("GPT3-175B, 25.02", GPT_175B, 512, 2048, 2, 2048, 4, 4, 1, 6, 1600),
    ("Nemotron-15B, 25.02", gpt(6144, 32, 48, 256_000), 64, 256, 2, 4096, 1, 1, 1, 1, 14_760),
)
"""DGX B200 (25.02: docs.nvidia.com/nemo-framework, performance summary), which took no part in any choice."""


def _nemo(table: tuple[tuple[Any, ...], ...], device: str) -> tuple[Row, ...]:
    rows = []
    for name, model, devices, batch, micro_batch, length, tp, pp, cp, virtual, published in table:
        dp = devices // (tp * pp * cp)
        rows.append(
            Row(
                group="NeMo",
                name=f"{name} on {devices} {device}",
                model=model,
                cluster=f"{devices}x{device}",
                layout=Layout(pp=pp, shard=dp, cp=cp, tp=tp),
                zero=2 if dp > 1 or cp > 1 else 0,
                length=length,
                micro_batch=micro_batch,
                accumulation=batch // (dp * micro_batch),
                published=published,
                is_fused=True,
                float8="te",
                attention="cudnn",
                async_tp=True,
                schedule=_stages(virtual),
                virtual=virtual,
                reduce="bf16",
                hidden="recompute: none; gradients: reduced in bf16",
            )
        )
    return tuple(rows)


NEMO = _nemo(_NEMO, "H100")
NEMO_BLIND = _nemo(_NEMO_BLIND, "B200")


# Megatron-LM on DGX A100 without fused attention: Narayanan et al. 2021 (arxiv.org/abs/2104.04473), table 1, fp16,
# T 2048, vocabulary 51,200, full recompute; teraFLOP/s count the recomputed pass. github.com/NVIDIA/Megatron-LM, tag
# 23.04, has the figures (images/cases_april2021.png) and all settings (examples/sc21/run_table_1.sh and CONFIG.sh).
# Korthikanti et al. 2022 (arxiv.org/abs/2205.05198), tables 3 and 5: seconds of an iteration without data parallelism.
# README.md of the same tag gives MFU of 41.5, 51.4, 56.0 and 56.3 %; the seconds with selective recompute yield 41.7,
# 51.4, 56.1 and 56.3 % by the paper's count of FLOPs.
# BLOOM-176B: github.com/bigscience-workshop/bigscience, train/tr11-176B-ml: tr11-176B-ml.slurm has the settings,
# README.md an iteration of 104.70 s (149.77 teraFLOP/s with the recomputed pass) and four Omni-Path links a node, each
# of 100 Gbit/s (arxiv.org/abs/2211.05100).

_WEAK_SCALING = (
    # billions, heads, width, layers, tp, pp, virtual, GPUs, batch, micro-batch, teraFLOP/s a GPU
    (1.7, 24, 2304, 24, 1, 1, 1, 32, 512, 16, 137),
    (3.6, 32, 3072, 30, 2, 1, 1, 64, 512, 16, 138),
    (7.5, 32, 4096, 36, 4, 1, 1, 128, 512, 16, 142),
    (18.4, 48, 6144, 40, 8, 1, 1, 256, 1024, 8, 135),
    (39.1, 64, 8192, 48, 8, 2, 1, 512, 1536, 4, 138),
    (76.1, 80, 10_240, 60, 8, 4, 3, 1024, 1792, 2, 140),
    (145.6, 96, 12_288, 80, 8, 8, 2, 1536, 2304, 2, 148),
    (310.1, 128, 16_384, 96, 8, 16, 2, 1920, 2160, 1, 155),
    (529.6, 128, 20_480, 105, 8, 35, 3, 2520, 2520, 1, 163),
    (1008.0, 160, 25_600, 128, 8, 64, 1, 3072, 3072, 1, 163),
)
_SEQUENCE_PARALLEL = (
    # billions, heads, width, layers, pp, virtual, batch, micro-batch, seconds with full and with selective recompute
    (22, 64, 6144, 48, 1, 1, 4, 4, 1.42, 1.10),
    (175, 96, 12_288, 96, 8, 3, 64, 1, 18.13, 13.75),
    (530, 128, 20_480, 105, 35, 3, 280, 1, 49.05, 37.83),
    (1000, 160, 25_600, 128, 64, 1, 512, 1, 94.42, 71.49),
)


def _recomputed_flops(model: DecoderConfig, length: int) -> float:
    """Return FLOPs a token, with a second forward pass: Narayanan et al. 2021, equation 3."""
    width, layers = model.width, model.num_layers
    return 96 * layers * width**2 * (1 + length / (6 * width) + model.vocab_size / (16 * layers * width))


def _megatron(name: str, model: DecoderConfig, layout: Layout, published: float, **more: object) -> Row:
    settings = {
        "zero": 0,
        "reduce": "bf16",
        "recompute": "full",
        "is_fused": True,
        "attention": "unfused",
        "cluster": f"{layout.world_size}xA100-80GB",
        "length": 2048,
    }
    return Row(group="Megatron-LM", name=name, model=model, layout=layout, published=published, **(settings | more))  # type: ignore[arg-type]


def _weak_scaling() -> tuple[Row, ...]:
    rows = []
    for size, heads, width, layers, tp, pp, virtual, devices, batch, micro_batch, tera in _WEAK_SCALING:
        model, dp = gpt(width, layers, heads), devices // (tp * pp)
        rows.append(
            _megatron(
                f"{size}B on {devices}",
                model,
                Layout(pp=pp, replicate=dp, tp=tp),
                tera * 1e12 / _recomputed_flops(model, 2048),
                micro_batch=micro_batch,
                accumulation=batch // (dp * micro_batch),
                schedule=_stages(virtual),
                virtual=virtual,
            )
        )
    return tuple(rows)


def _sequence_parallel() -> tuple[Row, ...]:
    rows = []
    for size, heads, width, layers, pp, virtual, batch, micro_batch, *seconds in _SEQUENCE_PARALLEL:
        for recompute, iteration in zip(("full", "selective"), seconds, strict=True):
            rows.append(
                _megatron(
                    f"{size}B on {8 * pp}, {recompute}",
                    gpt(width, layers, heads),
                    Layout(pp=pp, tp=8),
                    batch * 2048 / iteration / (8 * pp),
                    micro_batch=micro_batch,
                    accumulation=batch // micro_batch,
                    recompute=recompute,
                    schedule=_stages(virtual),
                    virtual=virtual,
                )
            )
    return tuple(rows)


_BLOOM = gpt(14_336, 70, 112, 250_880)
MEGATRON = (
    *_weak_scaling(),
    *_sequence_parallel(),
    _megatron(
        "BLOOM 176B on 384",
        _BLOOM,
        Layout(pp=12, shard=8, tp=4),
        2048 * 2048 / 104.70 / 384,
        zero=1,
        micro_batch=2,
        accumulation=128,
        nic_gbs=50.0,
    ),
)


# nanotron: huggingface.co/nanotron/old_bench and bench_cluster, log_metrics.csv of July 2024: 1B Llama, T 4096, batch
# 1024, H100. github.com/huggingface/bench_cluster has the settings (bench_cluster/create_configs.py and
# template/base_config.py: 1f1b, reductions scattered over the sequence, not overlapped; GPT-2's vocabulary). Its commit
# f55b5e5 of October 2024 fixes "throughput issue", by other versions of torch, triton and flash-attn, and uploads to
# another place: these rows were measured before it. 64 GPUs process fewer tokens per second than 16 there.

_NANOTRON = (
    # GPUs, tp, pp, micro-batch, tokens/s a GPU
    (8, 8, 1, 8, 20_000),
    (8, 4, 2, 8, 25_800),
    (16, 8, 2, 8, 14_400),
    (64, 8, 8, 16, 3480),
)


def _nanotron() -> tuple[Row, ...]:
    model = llama(2048, 24, 32, 32, 4096, vocab=50_257)
    rows = []
    for devices, tp, pp, micro_batch, published in _NANOTRON:
        rows.append(
            Row(
                group="nanotron",
                name=f"1B on {devices}, tp{tp} pp{pp}",
                model=model,
                cluster=f"{devices}xH100",
                layout=Layout(pp=pp, tp=tp),
                zero=0,
                length=4096,
                micro_batch=micro_batch,
                accumulation=1024 // micro_batch,
                published=published,
                hidden="kernels: not fused",
            )
        )
    return tuple(rows)


NANOTRON = _nanotron()


# Llama 3 405B: arxiv.org/abs/2407.21783, table 4: 430 and 400 teraFLOP/s a GPU (MFU 43 and 41 %) with tp 8, pp 16 and
# FSDP on 8,192 and 16,384 H100, T 8192, 16M tokens a batch, without recompute; RoCE with 400 Gbit/s a GPU.

_LLAMA3_FLOPS = 6 * 405.9e9 + 6 * 126 * 16_384 * 8192


def _llama3() -> tuple[Row, ...]:
    rows = []
    for devices, tera in ((8192, 430), (16_384, 400)):
        dp = devices // 128
        rows.append(
            Row(
                group="Llama 3",
                name=f"405B on {devices:,}",
                model=LLAMA3_405B,
                cluster=f"{devices}xH100",
                layout=Layout(pp=16, shard=dp, tp=8),
                zero=2,
                length=8192,
                micro_batch=1,
                accumulation=2048 // dp,
                published=tera * 1e12 / _LLAMA3_FLOPS,
                is_fused=True,
                schedule="interleaved_1f1b",
                virtual=7,
                hidden="virtual stages: 7; attention of causal halves counted; kernels: fused",
            )
        )
    return tuple(rows)


LLAMA3 = _llama3()
