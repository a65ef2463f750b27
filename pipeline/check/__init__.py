"""Freivalds' check of a stored product: whether C is A times B, and where it is not.

It reads three arrays and knows nothing of how C came to be; what a run does about a failed one is in `product/mend.py`.
"""
