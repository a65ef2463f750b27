"""Eigenvalues and vectors of stored matrices: `krylov` is the method, which knows no store; `operators` has its
products computed as any other product is; `job` runs it, and `eof_group` writes what comes of it."""
