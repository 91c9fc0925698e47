"""Learning-rate schedules, each registered under its name; `ssscale.train.schedule` places them in a run's stages."""
