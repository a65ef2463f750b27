"""The k nearest rows and the pairs beyond a threshold, of stored matrices: `search.py` has both functions."""
