"""Compressed blocks decoded where they lie on a GPU, and decoded chunks put in their places in a matrix.

Knows no file and no format of a store: which bytes are a block, and what it holds, is told by who calls.
"""
