"""A chapter of the gallery as users run it: the commands of its README, as they are written."""

import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from e2e.processes import Command
from env.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
MARKDOWN = re.MULTILINE | re.DOTALL
FORKED = "forked "
"""Before a command of `shardwise` or `python`: Chapter.run runs it in a fork of the test process."""


@dataclass(frozen=True)
class Chapter:
    """A folder of the gallery and its README."""

    folder: Path

    @property
    def readme(self) -> str:
        return (self.folder / "README.md").read_text()

    def commands(self, *parts: str) -> list[str]:
        """Return the commands of the README's bash blocks that have all `parts`, in order, comments left out."""
        lines = [
            line for block in re.findall(r"^```bash\n(.*?)^```", self.readme, MARKDOWN) for line in block.split("\n")
        ]
        return [line for line in lines if line and not line.startswith("#") and all(part in line for part in parts)]

    def start(self, line: str, folder: Path | None = None, **variables: str) -> subprocess.Popen:
        """Start a command in the chapter's folder, or in another one, where what it writes then goes."""
        return subprocess.Popen(
            ["bash", "-c", self._in(folder, line)],
            cwd=folder or self.folder,
            env=self._environment() | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, line: str, folder: Path | None = None, **variables: str) -> str:
        """Run a command to its end and return what it printed."""
        if not line.startswith(FORKED):
            return finish(self.start(line, folder, **variables))
        done = self.fork(line.removeprefix(FORKED), folder, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def fork(self, line: str, folder: Path | None = None, **variables: str) -> subprocess.CompletedProcess:
        """Run a command of `shardwise` or `python` to its end, in a fork of the test process."""
        program, *arguments = shlex.split(self._in(folder, line))
        environ = self._environment() | variables
        return Command(folder or self.folder, *arguments, environ=environ, program=program).finish()

    def _environment(self) -> dict[str, str]:
        """Return the environment variables of a command."""
        return os.environ | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(self.folder)]),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "GLOO_SOCKET_IFNAME": "lo",
            "PET_LOCAL_ADDR": "127.0.0.1",  # torchrun's --local_addr: the two nodes of a test are this machine
        }

    def _in(self, folder: Path | None, line: str) -> str:
        """Return the command with full paths of its scripts if it runs in another folder than the chapter's."""
        # The default port of DeepSpeed's launcher is 29500, and tests run beside each other.
        line = line.replace("deepspeed --num_gpus", f"deepspeed --master_port={free_port()} --num_gpus")
        return line if folder is None else re.sub(r"(?<= )(\w+\.py)", rf"{self.folder}/\1", line)


def finish(process: subprocess.Popen, seconds: float = 200) -> str:
    """Wait for the end and return what was printed; leave no process behind if it takes too long."""
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        stop(process)
        pytest.fail(f"{process.args[-1]} still ran after {seconds} s:\n{process.communicate(timeout=10)[0]}")
    finally:
        stop(process)
    assert process.returncode == 0, output
    return output


def stop(process: subprocess.Popen) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):  # torchrun ends its workers when asked to, not when killed
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                continue


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
