"""The gallery as a course: its front page is generated, and every chapter is complete and runs when copied alone."""

import ast
import importlib
import json
import re
import shutil
import sys
import tomllib

import pytest

import shardwise as sw
from e2e.gallery import EXAMPLES, FORKED, ROOT, Chapter
from e2e.processes import shardwise

CHAPTERS = {path.parent.name: Chapter(path.parent) for path in sorted(EXAMPLES.glob("*/README.md"))}
ALONE = {
    # A command that uses what its folder shares, with options that make it quick.
    "01-ddp-basics": f"{FORKED}python ddp_mnist.py --data nowhere --limit 200 --epochs 1",
    "02-fsdp": "torchrun --nproc_per_node=2 fsdp_checkpoint.py --steps 2",
    "03-deepspeed": "torchrun --nproc_per_node=2 deepspeed_train.py --steps 1",
    "04-nccl-operations": "torchrun --nproc_per_node=2 collective_ops.py",
    "04b-parallel-by-hand": "torchrun --nproc_per_node=2 tensor_parallel.py --steps 1",
    "05-advanced": "torchrun --nproc_per_node=2 gradient_accumulation.py",
    "06-mlx": "python plain_mlx.py",
    "07-language-models": f"{FORKED}python documents.py",
    "benchmarks": "torchrun --nproc_per_node=2 distributed_benchmarks.py --steps 1 --layers 1",
}


@pytest.fixture
def matrix(monkeypatch):
    """The script that generates the decision matrix."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("decision_matrix")


def test_the_decision_matrix_is_what_plan_answers_today(matrix):
    assert matrix.TABLE.search((EXAMPLES / "README.md").read_text())[0] == matrix.table()


def test_the_reasons_below_the_matrix_have_the_numbers_of_plan():
    page = (EXAMPLES / "README.md").read_text()
    small = json.loads(sw.plan("gpt2-xl", cluster="4xA100-40GB").to_json())
    percent = re.match(r"(\d+)% slower", small["families"]["ddp"]["reason"])[1]
    assert f"takes {percent} % longer" in page
    large = json.loads(sw.plan("llama-70b", cluster="8x8xH100").to_json())
    error = round(100 * large["best"]["time"]["uncertainty"])
    assert f"{large['families']['3d']['reason'][0]} % faster than FSDP, within the model's error of {error} %" in page


def test_a_stale_decision_matrix_is_refused_and_mended(matrix, tmp_path, monkeypatch):
    page = tmp_path / "README.md"
    page.write_text((EXAMPLES / "README.md").read_text().replace("| GPT-2 XL", "| GPT-9"))
    monkeypatch.setattr(matrix, "PAGE", page)
    monkeypatch.setattr(matrix, "SCENARIOS", matrix.SCENARIOS[:2])
    monkeypatch.setattr(sys, "argv", ["decision_matrix.py", "--check"])
    with pytest.raises(SystemExit):
        matrix.main()
    monkeypatch.setattr(sys, "argv", ["decision_matrix.py", "--write"])
    matrix.main()
    monkeypatch.setattr(sys, "argv", ["decision_matrix.py", "--check"])
    matrix.main()


MATRIX = re.search(r"run the advice of each row.*?```bash\n(.*?)```", (EXAMPLES / "README.md").read_text(), re.DOTALL)[
    1
]


@pytest.mark.prove
@pytest.mark.timeout(600)
@pytest.mark.parametrize("line", MATRIX.splitlines())
def test_the_advice_of_a_row_of_the_matrix_trains(line, tmp_path):
    copy = shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("runs", "__pycache__"))
    output = Chapter(copy).run(line)
    assert re.search(r"loss|adapters are in", output)


def test_the_front_page_links_every_chapter_and_shows_every_file():
    page = (EXAMPLES / "README.md").read_text()
    assert [name for name in CHAPTERS if f"]({name}/README.md)" not in page] == []
    files = [
        path for name in CHAPTERS for path in (EXAMPLES / name).iterdir() if path.suffix in (".py", ".sh", ".json")
    ]
    assert [path.name for path in files if path.name not in page] == []


def test_the_table_of_presets_is_theirs_and_doctor_env_accepts_each():
    page = (EXAMPLES / "README.md").read_text()
    presets = tomllib.loads((ROOT / "src/shardwise/diagnosis/presets.toml").read_text())
    for name, preset in presets.items():
        variables = " ".join(f"`{key}={value}`" for key, value in preset["variables"].items())
        assert f"| `{name}` | {preset['about']} | {variables} |" in page
        found = shardwise(EXAMPLES, "doctor", "env", **preset["variables"])
        assert (found.returncode, "\nfail " in f"\n{found.stdout}") == (0, False), found.stdout


def test_every_chapter_is_copied_alone_below():
    assert set(ALONE) == set(CHAPTERS)


@pytest.mark.representative("01-ddp-basics")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ALONE)
def test_a_chapter_runs_when_copied_alone(name, tmp_path):
    copy = shutil.copytree(EXAMPLES / name, tmp_path / name, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    assert Chapter(copy).run(ALONE[name])


@pytest.mark.parametrize("name", CHAPTERS)
def test_a_chapter_needs_nothing_from_other_folders(name):
    folder = EXAMPLES / name
    outside = [line for line in CHAPTERS[name].commands() if "../" in line]
    missing = []
    for path in folder.glob("*.py"):
        for module in imported(path):
            is_here = (folder / f"{module}.py").exists()
            if not is_here and module not in sys.stdlib_module_names and module not in INSTALLED:
                missing.append((path.name, module))
    assert outside + missing == []


INSTALLED = {"torch", "numpy", "shardwise", "transformers", "peft", "deepspeed", "mlx"}
"""What the prerequisites of the front page install."""


def imported(path):
    """Return the top-level names of every import of a script."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize("name", CHAPTERS)
def test_a_chapter_has_output_exercises_reading_and_a_drawing(name):
    page = CHAPTERS[name].readme
    for heading in ("## Exercises", "## Further reading"):
        section = page.partition(heading)[2].partition("\n## ")[0]
        assert len(re.findall(r"^(?:\d+\.|-) ", section, re.MULTILINE)) >= 2, heading
    assert "bench comm --explain" in page
    assert re.search(r"^```\n", page, re.MULTILINE)
