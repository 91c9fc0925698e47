from eval.checkpoint.environment import prepare

prepare()  # before any test module imports lm-eval
