"""Record goldens again, by hand: `python tests/goldens/record.py NAME...`. A changed golden needs a reason."""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from goldens import checkpoints, draws, gallery, mlx_gallery, outputs, plans, runs, surface
from goldens.store import rounded, save


def record_gallery(folder):
    """Train every torch job of the gallery: 1.5 minutes."""
    jobs = gallery.load_gallery(folder)
    alone = gallery.train_gallery(jobs, gallery.single_keys(jobs), 1, folder)
    pairs = gallery.train_gallery(jobs, gallery.pair_keys(), 2, folder)
    save("gallery_one_process", _trainings(alone))
    save("gallery_two_ranks", _trainings(pairs))


def record_mlx(folder):
    """Train the MLX jobs of the gallery."""
    save("gallery_mlx", _trainings(mlx_gallery.train(folder)))


def record_draws(folder):
    """Draw weights, masks and sample orders."""
    found = draws.draws()
    save("draws", {**found, "first weights": rounded(found["first weights"], 12)})
    save("parameter_names", draws.parameter_names())


def record_outputs(_):
    """Run every command that has --json; plan what is planned."""
    save("plan_outputs", {name: outputs.plan_output(arguments) for name, arguments in outputs.PLANS.items()})
    commands = {**outputs.QUICK, **outputs.WHOLE}
    save("schemas", {name: outputs.schema(outputs.output_of(name, parts)[1]) for name, parts in commands.items()})


def record_surface(_):
    """List the command line and the public names. Recorded once: what is renamed later stands in CHANGELOG.md."""
    save("surface", {"command line": surface.command_line(), "python": surface.public_names()})


def record_plans(_):
    """Write plan files of version 1. Recorded once: they must stay readable."""
    plans.write_all()


def record_checkpoints(folder):
    """Write checkpoints of version 1. Recorded once: they must stay readable."""
    whole = checkpoints.write_all(folder)
    save("resumed", {"losses": rounded(whole["losses"], 15), "weights": rounded(whole["weights"], 12)})


def record_runs(folder):
    """Write run directories of version 1. Recorded once: they must stay readable."""
    runs.write_all(folder)


def record_readings(folder):
    """Read the recorded run directories."""
    save("run_readings", runs.readings(folder))


def _trainings(results):
    """Round losses to 15 digits and checksums of weights to 12."""
    return {
        name: {
            "precision": result["precision"],
            "losses": rounded(result["losses"], 15),
            "weights": rounded(result["weights"], 12),
        }
        for name, result in results.items()
    }


RECORDERS = {
    "gallery": record_gallery,
    "mlx": record_mlx,
    "draws": record_draws,
    "outputs": record_outputs,
    "surface": record_surface,
    "plans": record_plans,
    "checkpoints": record_checkpoints,
    "runs": record_runs,
    "readings": record_readings,
}


def main():
    names = sys.argv[1:]
    if not names or not set(names) <= set(RECORDERS):
        raise SystemExit(f"name what to record: {', '.join(RECORDERS)}")
    for name in names:
        with tempfile.TemporaryDirectory(prefix="goldens-") as folder:
            RECORDERS[name](Path(folder))


if __name__ == "__main__":
    main()
