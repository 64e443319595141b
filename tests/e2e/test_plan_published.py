import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "plan_published.py"


def test_published_runs_are_predicted_within_their_targets():
    shown = subprocess.run([sys.executable, SCRIPT, "--quick"], capture_output=True, text=True, check=True).stdout
    figures = [line for line in shown.splitlines() if line.startswith("FIGURE")]
    assert [line.split()[1] for line in figures if line.endswith(" met")] == [
        "plan.published.within",
        "plan.published.order",
    ]
    assert "missed" not in shown
