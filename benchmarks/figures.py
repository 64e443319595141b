"""What every benchmark ends with: one line per figure, `met` or `missed` computed from its target."""

from __future__ import annotations


def figure(name: str, value: float, unit: str, *, at_most: float | None = None, at_least: float | None = None) -> None:
    """Print one figure beside its target."""
    if at_most is not None:
        target, met = f"<={at_most:g}", value <= at_most
    elif at_least is not None:
        target, met = f">={at_least:g}", value >= at_least
    else:
        print(f"FIGURE {name} {value:.4g} {unit}", flush=True)
        return
    print(f"FIGURE {name} {value:.4g} {unit} target {target} {'met' if met else 'missed'}", flush=True)
