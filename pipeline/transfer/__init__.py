"""Bytes between files, host memory and a GPU, moved and decoded without the interpreter's lock.

Nothing here knows an array's metadata, a plan or Dask; `store` says which bytes, `worker` and `text` say where to.
"""
