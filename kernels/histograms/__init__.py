"""Histograms of bytes in memory, on one device: of single bytes, pairs, tokens, per document.

`api` is the public function; `host` counts on a CPU, the others on a GPU. Corpora are in `pipeline/text`.
"""
