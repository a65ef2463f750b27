"""Nearest rows and pairs beyond a threshold, of stored matrices: what is asked for, planned, found, checked and stored.

The search itself is in `tilewright.kernels.neighbours`, of which a task gives each block of rows of A all rows of B.
"""
