"""Quality signals of documents on the CPU: what each says (`definitions.py`), and the loops that find them.

Loops get the bytes of several documents, one behind the other, and say of each what it has. Dask, files and compressors
are unknown here.
"""
