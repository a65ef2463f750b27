"""Benchmarks of this installation beside other libraries, in the same run."""
