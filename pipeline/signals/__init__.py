"""Quality signals of a corpus: one pass over its documents, a row of numbers for each.

The loops are in `tilewright.kernels.signals`, which defines the signals; what a document is, `tilewright.pipeline.text`
says.
"""
