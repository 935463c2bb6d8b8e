"""Training runs: the loop, run directories, evaluation, checkpoints, loggers."""
