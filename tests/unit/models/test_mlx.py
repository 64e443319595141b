"""MLX's models as an extra: not imported before they are asked for, one sentence where it is missing."""

import subprocess
import sys


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_mlx_is_imported_at_the_first_use_of_its_models():
    asked = ["sw.models.decoder", "sw.models.mlx"]
    lines = ["import sys, shardwise as sw", *(f"{name}; print('mlx.core' in sys.modules)" for name in asked)]
    assert run("\n".join(lines)).stdout.split() == ["False", "True"]


def test_without_mlx_one_sentence_gives_the_pip_line():
    missing = "import sys; sys.modules['mlx'] = None"
    asking = "try: sw.models.mlx\nexcept sw.ShardwiseError as error: print(error)"
    found = run(f"{missing}\nimport shardwise as sw\n{asking}").stdout
    assert found.endswith(": pip install 'shardwise[mlx]'\n")
