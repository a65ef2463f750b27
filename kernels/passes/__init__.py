"""One pass over an array where it lies, on a CPU or a GPU: looking at it, counting in it, transposing it.

No product and no histogram; those are in `gemm`, `dots` and `histograms`.
"""
