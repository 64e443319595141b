"""Published runs of LLM-foundry on H100 and A100: github.com/mosaicml/llm-foundry, scripts/train/benchmarking.

README.md has the tables. MPT models: learned positions, no biases, tied head, vocabulary 50,368; FSDP, eager, gradients
reduced after every micro-batch (Composer's default). sweep.sh ran release 0.0.4 with torch 2.0.1 and CUDA 11.8, whose
configurations use the Triton version of FlashAttention. A100 nodes have 1,600 Gbit/s of RoCE; the network of the H100
nodes is not stated. All bf16 rows up to 32,768 tokens are here, and of the smallest two models every second.
"""

from __future__ import annotations

from plan_published_rows import Row, gpt
from shardwise.layout import Layout

_SIZES = {
    "125m": (768, 12, 12),
    "350m": (1024, 24, 16),
    "760m": (1536, 24, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}
"""Model -> width, layers, heads."""

# model, T, GPUs, micro-batch, accumulation, whether blocks are recomputed, tokens/s a GPU

_H100 = """
70b 2048 64 8 4 full 1039
70b 2048 32 2 16 full 882
30b 8192 8 1 21 full 1384
30b 4096 8 1 21 full 1802
30b 2048 32 14 3 full 2308
30b 2048 16 10 3 full 2263
30b 2048 8 3 21 full 2002
30b 1024 8 6 21 full 2084
13b 32768 8 1 3 full 1976
13b 16384 8 3 3 full 2985
13b 4096 8 10 3 full 4717
13b 2048 64 2 1 none 4800
13b 2048 32 2 1 none 4811
13b 2048 16 2 1 none 4767
13b 2048 8 2 1 none 4792
13b 1024 8 40 3 full 5502
7b 32768 8 2 2 full 3318
7b 8192 8 8 2 full 6935
7b 4096 8 16 2 full 8611
7b 2048 8 6 1 none 10643
7b 1024 8 64 2 full 10203
3b 32768 8 3 6 full 5873
3b 16384 8 1 6 none 11152
3b 8192 8 3 6 none 16578
3b 4096 8 5 6 none 20964
3b 2048 64 6 3 none 22525
3b 2048 32 6 3 none 23021
3b 2048 16 10 3 none 24142
3b 1024 8 20 6 none 27046
3b 512 8 40 6 none 27965
1b 32768 8 1 4 none 12025
1b 16384 8 2 4 none 19649
1b 8192 8 3 4 none 29157
1b 4096 8 7 4 none 38535
1b 2048 64 20 1 none 44402
1b 2048 32 20 1 none 45130
1b 2048 16 20 1 none 46037
1b 2048 8 14 1 none 45455
1b 1024 8 18 4 none 48910
1b 512 8 56 4 none 52275
760m 32768 8 1 2 none 16291
760m 16384 8 3 2 none 27815
760m 8192 8 6 2 none 41825
760m 4096 8 12 2 none 55459
760m 2048 32 24 1 none 67971
760m 2048 16 24 1 none 68551
760m 2048 8 24 2 none 63147
760m 1024 8 48 2 none 78581
760m 512 8 96 2 none 83749
"""
_A100 = """
70b 2048 64 8 4 full 410
70b 2048 32 2 16 full 373
30b 8192 8 1 21 full 574
30b 4096 8 1 21 full 814
30b 2048 8 3 21 full 916
30b 1024 8 6 21 full 946
30b 512 8 12 21 full 967
13b 32768 8 1 3 full 1016
13b 16384 8 3 3 full 1431
13b 8192 8 5 3 full 1795
13b 4096 8 10 3 full 2060
13b 2048 8 2 3 none 2262
13b 1024 8 40 3 full 2330
7b 32768 8 2 2 full 1672
7b 16384 8 4 2 full 2453
7b 8192 8 8 2 full 3206
7b 4096 8 16 2 full 3684
7b 2048 8 6 2 none 4641
7b 1024 8 64 2 full 4357
3b 32768 8 3 6 full 3029
3b 16384 8 1 6 none 5529
3b 8192 8 3 6 none 7695
3b 4096 8 5 6 none 9457
3b 2048 8 10 2 none 10811
3b 1024 8 20 6 none 11580
3b 512 8 40 6 none 12127
1b 32768 8 1 4 none 6275
1b 16384 8 2 4 none 9956
1b 8192 8 3 4 none 13814
1b 4096 8 7 4 none 17807
1b 2048 8 14 4 none 20513
1b 1024 8 18 4 none 22112
1b 512 8 56 4 none 23148
760m 32768 8 1 2 none 8802
760m 16384 8 3 2 none 14274
760m 8192 8 6 2 none 20933
760m 4096 8 12 2 none 27351
760m 2048 8 24 2 none 32434
760m 1024 8 48 2 none 29765
760m 512 8 96 2 none 29446
350m 32768 8 2 2 none 13652
350m 8192 8 8 2 none 36569
350m 2048 8 32 2 none 58782
350m 512 8 128 2 none 69330
125m 32768 8 2 2 none 36407
125m 8192 8 8 2 none 90392
125m 2048 8 32 2 none 141737
125m 512 8 128 2 none 165681
"""

_BLIND_A100 = """
70b 2048 128 4 1 full 376
70b 2048 64 2 1 full 276
30b 2048 128 6 1 full 865
30b 2048 32 4 1 full 857
13b 8192 8 1 16 full 1407
13b 4096 8 2 16 full 1603
13b 2048 128 16 1 full 1972
13b 2048 64 16 1 full 1976
13b 2048 32 14 1 full 1998
13b 2048 16 10 1 full 1993
13b 2048 8 4 16 full 1668
13b 1024 8 8 16 full 1727
13b 512 8 16 16 full 1763
7b 16384 8 1 4 full 2249
7b 8192 8 3 4 full 2887
7b 4096 8 6 4 full 3366
7b 2048 128 18 1 full 3623
7b 2048 64 18 1 full 3665
7b 2048 32 18 1 full 3725
7b 2048 16 16 1 full 3645
7b 2048 8 12 4 full 3679
7b 1024 8 24 4 full 3854
7b 512 8 48 4 full 3895
3b 32768 8 1 4 full 2955
3b 8192 8 1 8 none 7149
3b 4096 8 2 8 none 8777
3b 2048 128 6 1 none 9538
3b 2048 64 6 1 none 9736
3b 2048 32 6 1 none 9914
3b 2048 16 5 1 none 9750
3b 2048 8 5 8 none 10065
3b 512 8 20 8 none 11324
1b 32768 8 1 4 full 5095
1b 8192 8 2 8 none 13474
1b 2048 128 10 1 none 18647
1b 2048 64 10 1 none 19001
1b 2048 32 10 1 none 15555
1b 2048 16 8 1 none 19085
1b 2048 8 8 8 none 19271
1b 512 8 32 8 none 21782
760m 8192 8 3 4 none 20106
760m 2048 128 12 1 none 28940
760m 2048 32 12 1 none 29648
760m 2048 8 12 4 none 30173
760m 512 8 48 4 none 34938
350m 8192 8 4 4 none 34933
350m 2048 128 18 1 none 51934
350m 2048 8 16 4 none 55995
125m 8192 8 5 3 none 86858
125m 2048 128 26 1 none 123936
125m 2048 8 26 3 none 136334
"""
_BLIND_FP8 = """
3b 32768 8 3 6 full 5856
3b 8192 8 3 6 none 19146
3b 2048 8 10 6 none 30586
3b 512 8 40 6 none 36527
1b 32768 8 1 4 none 12580
1b 8192 8 2 4 none 32010
1b 512 8 56 4 none 70315
"""


def _rows(table: str, device: str, hidden: str, **more: object) -> tuple[Row, ...]:
    rows = []
    for line in table.split("\n"):
        if not line:
            continue
        size, length, devices, micro_batch, accumulation, recompute, published = line.split()
        rows.append(
            Row(
                group="LLM-foundry",
                name=f"{size} T{length} on {devices} {device}",
                model=gpt(*_SIZES[size], vocab=50_368),
                cluster=f"{devices}x{device}",
                layout=Layout(shard=int(devices)),
                length=int(length),
                micro_batch=int(micro_batch),
                accumulation=int(accumulation),
                published=float(published),
                recompute=recompute,
                sync="every",
                attention="triton",
                hidden=hidden,
                **more,  # type: ignore[arg-type]
            )
        )
    return tuple(rows)


MOSAIC = (*_rows(_H100, "H100", "network: the catalogue's"), *_rows(_A100, "A100-80GB", "network: 1,600 Gbit/s a node"))
MOSAIC_BLIND = (
    *_rows(_BLIND_A100, "A100-40GB", "network: 1,600 Gbit/s a node", reduce="bf16"),
    *_rows(_BLIND_FP8, "H100", "network: the catalogue's", float8="te"),
)
"""Tables of A100-40GB (of small models every second row) and of fp8, which took no part in any choice."""
