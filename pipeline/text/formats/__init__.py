"""What a file of a corpus is, and the documents that it consists of.

`recognition` tells what a file is by its first bytes, `opening` has it decoded and split, layer by layer: a compressor,
a container, a compressor again, an encoding, records. `sources` says what all of these give: the bytes of consecutive
documents, and where each ends. Nothing here counts, and nothing of what is read is ever written to a disk."""
