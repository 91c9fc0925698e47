"""Learning-rate schedules, each registered under its name. `ssscale.train.schedule` applies them to a run's stages."""
