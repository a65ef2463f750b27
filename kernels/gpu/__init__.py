"""What every kernel on a GPU needs: which device, its memory, streams, compiling, launching, copying.

Nothing here knows what is computed. The instructions themselves are in `tilewright.kernels.ptx`.
"""
