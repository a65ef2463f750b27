"""Duplicates in a corpus: signatures of its documents, buckets of those that agree in a band, pairs verified by what
they hold, and clusters.

The loops are in `tilewright.kernels.duplicates`; what a document is, `tilewright.pipeline.text` says.
"""
