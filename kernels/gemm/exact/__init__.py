"""Products of wide integers, exact: cut into planes of bytes or residues that tensor cores multiply.

The planes are multiplied in `tensor` and `hopper`; here they are made, and put together again.
"""
