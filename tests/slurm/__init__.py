"""Batch jobs under a real Slurm: ``run`` brings one of two nodes up on this host, and these tests then use it."""
