"""Matrix products on a CPU, and the compiled loops that other CPU code shares.

Nothing here imports ``numba.cuda``. Histograms and dot products have their CPU code beside their GPU code.
"""
