"""Gram matrices, covariances and correlations: what is asked for, the statistics of a first streamed pass over the
matrix, and the transforms and epilogue that both make of it. The product itself is `pipeline.product`'s, and nothing
here multiplies, plans or writes."""
