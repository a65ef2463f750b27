"""The rungs that a reader learns from: each one idea more than the last, for every dtype and every GPU.

No other kernel builds on them; they are what the faster ones are compared with, and what is left where none of those fits.
"""
