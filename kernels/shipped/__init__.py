"""Machine code of kernels that comes with an installation, so that the first use of a machine compiles none: the files
that hold it, what a GPU that is not there would need, and how a kernel's arguments lie. No kernels live here."""
