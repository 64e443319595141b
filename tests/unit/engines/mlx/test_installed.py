"""Which MLX is taken, and what the oldest one taken gives: kernels that no rank sees unfinished."""

import os
import subprocess
import sys

from refusals import refuses
from shardwise.engines.mlx import engine


def test_older_ones_are_refused_by_number(monkeypatch):
    for enough in ("0.32.4", "0.33.0.dev1+abc", "1.0"):
        monkeypatch.setattr(engine, "version", lambda _, found=enough: found)
        engine.ENGINE.require()
    monkeypatch.setattr(engine, "version", lambda _: "0.32.3")
    with refuses("engine.mlx-too-old", "0.32.4", "0.32.3"):
        engine.ENGINE.require()


KERNEL = "import mlx.core as mx; mx.eval(mx.compile(lambda x: mx.exp(x) * 3 + x)(mx.ones(4)))"


def test_a_kernel_that_another_process_compiles_is_not_seen_before_it_is_whole(tmp_path):
    ranks = [
        subprocess.Popen([sys.executable, "-c", KERNEL], env={**os.environ, "TMPDIR": str(tmp_path)}) for _ in range(2)
    ]
    sizes = set()
    while any(rank.poll() is None for rank in ranks):
        sizes |= {path.stat().st_size for path in tmp_path.rglob("lib*.so")}
    assert [rank.returncode for rank in ranks] == [0, 0]
    (library,) = tmp_path.rglob("lib*.so")
    assert sizes <= {library.stat().st_size}
