"""The papers' findings at the 50m size: several seeds, learning rates chosen on validation, one small JSON per job."""
