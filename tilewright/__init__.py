"""Tilewright: multiply Zarr matrices larger than a GPU, and count text corpora, with Dask and Numba CUDA.

Functions, each of which says more to ``help``:

    matmul          C = op(A) op(B), Zarr arrays of any size, verified and resumable
    gram            the products of every two columns of a matrix, centred, scaled, weighted
    cov             their covariances
    corr            their correlations
    eofs            the leading EOFs of a matrix, by products that stream it
    eigh            the leading eigenpairs of a stored symmetric matrix
    topk            the nearest rows of a matrix to each row of another, exactly
    pairs           all pairs of rows that are nearer, or farther, than a threshold
    plan_matmul     the tiles, memory and bytes read of such a product, before any work
    verify          whether C = op(A) op(B) holds, without computing it again
    audit           whether what is stored of C is what was written, chunk by chunk
    histogram       how often each byte, letter, pair or character occurs in files
    plan_histogram  how they would be counted: files, pieces, memory, what would be refused
    duplicates      which documents are the same, or nearly, and which to keep
    signals         quality signals of each document, by which corpora are filtered
    slice           some rows and columns of a matrix, as an input of these
    open_xarray     a stored result as a DataArray of xarray, with coordinates
    dot             the sum of conj(x) y over two stored vectors
    devices         the GPUs that can be used here
    open_cluster    a cluster for several of these, as a context manager

They return `MatmulRun`, `EofRun`, `Eofs`, `Eigenpairs`, `TopkRun`, `PairsRun`, `MatmulPlan`, `CountPlan`,
`Verification`, `Audit`, `Histogram`, `Duplicates`, `Signals` and a list of `Device`. All errors are subclasses of
`TilewrightError`. ``tilewright.kernels`` has `matmul`, `histogram` and `dot` for arrays in memory.

The public names are imported on first use, so that ``import tilewright`` costs nothing and works on a machine without
CUDA.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_ERRORS = (
    "ClusterError",
    "CompressedError",
    "ConvergenceError",
    "CorpusError",
    "DTypeError",
    "DamagedError",
    "DamagedProductError",
    "DeviceMemoryError",
    "DeviceUnavailableError",
    "DocumentError",
    "MalformedDocumentError",
    "OptionError",
    "OutputError",
    "OutputExistsError",
    "PlanError",
    "RunEndedError",
    "ShapeError",
    "StoreError",
    "TaskError",
    "TilewrightError",
    "VerificationError",
)

_HOME = {
    "CountPlan": "tilewright.pipeline.forecast.counts",
    "Duplicates": "tilewright.pipeline.duplicates.result",
    "Device": "tilewright.kernels.gpu.device",
    "Histogram": "tilewright.pipeline.text.histogram",
    "MatmulPlan": "tilewright.pipeline.plan.product",
    "MatmulRun": "tilewright.pipeline.product.execute",
    "Verification": "tilewright.pipeline.check.verify",
    "Audit": "tilewright.pipeline.product.audit",
    "Eigenpairs": "tilewright.pipeline.spectral.results",
    "EofRun": "tilewright.pipeline.spectral.results",
    "Eofs": "tilewright.pipeline.spectral.results",
    "NeighbourAudit": "tilewright.pipeline.neighbours.audit",
    "NeighbourCheck": "tilewright.pipeline.neighbours.check",
    "NeighbourPlan": "tilewright.pipeline.neighbours.plan",
    "Neighbours": "tilewright.kernels.neighbours.order",
    "Pairs": "tilewright.kernels.neighbours.order",
    "PairsRun": "tilewright.pipeline.neighbours.results",
    "Signals": "tilewright.pipeline.signals.result",
    "TopkRun": "tilewright.pipeline.neighbours.results",
    "audit": "tilewright.workflows.audit",
    "corr": "tilewright.workflows.gram",
    "cov": "tilewright.workflows.gram",
    "devices": "tilewright.workflows.devices",
    "dot": "tilewright.workflows.dot",
    "duplicates": "tilewright.workflows.documents.duplicates",
    "gram": "tilewright.workflows.gram",
    "eigh": "tilewright.workflows.eofs",
    "eofs": "tilewright.workflows.eofs",
    "histogram": "tilewright.workflows.histogram",
    "matmul": "tilewright.workflows.matmul",
    "open_cluster": "tilewright.pipeline.cluster.cluster",
    "open_xarray": "tilewright.pipeline.labelled",
    "pairs": "tilewright.workflows.neighbours.search",
    "plan_histogram": "tilewright.workflows.histogram",
    "plan_matmul": "tilewright.workflows.matmul",
    "repair": "tilewright.workflows.repair",
    "signals": "tilewright.workflows.documents.signals",
    "slice": "tilewright.pipeline.store.sources.slices",
    "topk": "tilewright.workflows.neighbours.search",
    "verify": "tilewright.workflows.verify",
} | dict.fromkeys(_ERRORS, "tilewright.pipeline.errors")

__all__ = ["__version__", *sorted(_HOME)]

if TYPE_CHECKING:
    from tilewright.kernels.gpu.device import Device as Device
    from tilewright.kernels.neighbours.order import Neighbours as Neighbours
    from tilewright.kernels.neighbours.order import Pairs as Pairs
    from tilewright.pipeline.check.verify import Verification as Verification
    from tilewright.pipeline.cluster.cluster import open_cluster as open_cluster
    from tilewright.pipeline.duplicates.result import Duplicates as Duplicates
    from tilewright.pipeline.errors import ClusterError as ClusterError
    from tilewright.pipeline.errors import CompressedError as CompressedError
    from tilewright.pipeline.errors import ConvergenceError as ConvergenceError
    from tilewright.pipeline.errors import CorpusError as CorpusError
    from tilewright.pipeline.errors import DamagedError as DamagedError
    from tilewright.pipeline.errors import DamagedProductError as DamagedProductError
    from tilewright.pipeline.errors import DeviceMemoryError as DeviceMemoryError
    from tilewright.pipeline.errors import DeviceUnavailableError as DeviceUnavailableError
    from tilewright.pipeline.errors import DocumentError as DocumentError
    from tilewright.pipeline.errors import DTypeError as DTypeError
    from tilewright.pipeline.errors import MalformedDocumentError as MalformedDocumentError
    from tilewright.pipeline.errors import OptionError as OptionError
    from tilewright.pipeline.errors import OutputError as OutputError
    from tilewright.pipeline.errors import OutputExistsError as OutputExistsError
    from tilewright.pipeline.errors import PlanError as PlanError
    from tilewright.pipeline.errors import RunEndedError as RunEndedError
    from tilewright.pipeline.errors import ShapeError as ShapeError
    from tilewright.pipeline.errors import StoreError as StoreError
    from tilewright.pipeline.errors import TaskError as TaskError
    from tilewright.pipeline.errors import TilewrightError as TilewrightError
    from tilewright.pipeline.errors import VerificationError as VerificationError
    from tilewright.pipeline.forecast.counts import CountPlan as CountPlan
    from tilewright.pipeline.labelled import open_xarray as open_xarray
    from tilewright.pipeline.neighbours.audit import NeighbourAudit as NeighbourAudit
    from tilewright.pipeline.neighbours.check import NeighbourCheck as NeighbourCheck
    from tilewright.pipeline.neighbours.plan import NeighbourPlan as NeighbourPlan
    from tilewright.pipeline.neighbours.results import PairsRun as PairsRun
    from tilewright.pipeline.neighbours.results import TopkRun as TopkRun
    from tilewright.pipeline.plan.product import MatmulPlan as MatmulPlan
    from tilewright.pipeline.product.audit import Audit as Audit
    from tilewright.pipeline.product.execute import MatmulRun as MatmulRun
    from tilewright.pipeline.signals.result import Signals as Signals
    from tilewright.pipeline.spectral.results import Eigenpairs as Eigenpairs
    from tilewright.pipeline.spectral.results import EofRun as EofRun
    from tilewright.pipeline.spectral.results import Eofs as Eofs
    from tilewright.pipeline.store.sources.slices import slice as slice
    from tilewright.pipeline.text.histogram import Histogram as Histogram
    from tilewright.workflows.audit import audit as audit
    from tilewright.workflows.devices import devices as devices
    from tilewright.workflows.documents.duplicates import duplicates as duplicates
    from tilewright.workflows.documents.signals import signals as signals
    from tilewright.workflows.dot import dot as dot
    from tilewright.workflows.eofs import eigh as eigh
    from tilewright.workflows.eofs import eofs as eofs
    from tilewright.workflows.gram import corr as corr
    from tilewright.workflows.gram import cov as cov
    from tilewright.workflows.gram import gram as gram
    from tilewright.workflows.histogram import histogram as histogram
    from tilewright.workflows.histogram import plan_histogram as plan_histogram
    from tilewright.workflows.matmul import matmul as matmul
    from tilewright.workflows.matmul import plan_matmul as plan_matmul
    from tilewright.workflows.neighbours.search import pairs as pairs
    from tilewright.workflows.neighbours.search import topk as topk
    from tilewright.workflows.repair import repair as repair
    from tilewright.workflows.verify import verify as verify


if not TYPE_CHECKING:  # a type checker takes it for every name, misspelt ones too

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(
                f"module 'tilewright' has no attribute {name!r}; it has {', '.join(__all__)}"
            )
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
