"""Histograms of text corpora, from files to counts: finding and cutting files, decompressing, counting, adding up.

The kernels that count are in `tilewright.kernels.histograms`.
"""
