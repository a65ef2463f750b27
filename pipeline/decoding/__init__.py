"""Encoded chunks that a GPU decodes on their way into its memory, beside the cores: which, in what order, and by whom.

What the device does to them is in `tilewright.kernels.decoding`; how bytes get there, in
`tilewright.pipeline.transfer`.
"""
