"""Near-duplicate documents on the CPU: their shingles, hashes of these, MinHash signatures, and exact Jaccard indices.

What brings documents here and compares their signatures is `tilewright.pipeline.duplicates`.
"""
