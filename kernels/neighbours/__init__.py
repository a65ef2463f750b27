"""The k nearest rows of another matrix, and the pairs beyond a threshold, without the matrix of products.

`order.py` says what the answer is, `host.py` finds it on a CPU, `device.py` on a GPU. Nothing here knows a file.
"""
