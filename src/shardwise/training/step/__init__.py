"""One optimizer step behind one call: `step(batch) -> StepReport`."""
