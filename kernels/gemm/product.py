"""The public product: check everything, then hand the problem to a kernel or to the CPU twin.

What depends only on shapes, strides, dtypes, options and alignment is decided once and remembered, down to the packed
arguments of the launches (`kernels/gpu/recording.py`), so that a small product of device arrays costs little more
than its launch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar, Unpack, overload

import numpy as np

from tilewright.kernels.arguments import (
    check_choice,
    check_flag,
    check_host_out,
    host_array,
    new_host_array,
)
from tilewright.kernels.bfloat16 import BFLOAT16
from tilewright.kernels.choices import PRECISIONS, DeviceArray, DeviceName, HostArray, PrecisionName
from tilewright.kernels.deferred import cuda
from tilewright.kernels.errors import DTypeError, OptionError, OutputError
from tilewright.kernels.gemm import check, tuning
from tilewright.kernels.gemm.base import GemmKernel, Operand, Problem
from tilewright.kernels.gemm.scratch import borrowed
from tilewright.kernels.gpu import device_choice, launch
from tilewright.kernels.gpu.device_array import (
    Memory,
    alignment,
    as_device_array,
    check_alignment,
    device_index,
    is_device_array,
    memory_of,
    to_device,
    to_host,
    transposed,
)
from tilewright.kernels.gpu.recording import Place, Plan, Recording, Rehearsal
from tilewright.kernels.gpu.streams import as_stream, check_stream, launch_stream

Out = TypeVar("Out", bound=DeviceArray)

Layout = tuple[tuple[int, ...], tuple[int, ...], np.dtype, int]
"""Shape, strides in bytes, dtype and address modulo `MAX_ALIGNMENT` of an array: all that a decision depends on."""


LEAST_MIRRORED = 1024
"""Sides, and k, from which half of a product and a mirror image cost less than all of it."""


@dataclass(frozen=True)
class Decision:
    """What was decided about a product of device arrays with given layouts."""

    shape: tuple[int, int]
    dtype: np.dtype
    spans: tuple[tuple[int, int], ...]
    """The byte ranges of a, b and out, as `check.span` gives them."""
    kernel: GemmKernel | None
    """None where there is nothing to do: an empty side, or nothing to add."""
    half: str = "none"
    """``lower`` where the kernel leaves out what lies above the diagonal, ``mirrored`` where that is then copied from
    below it; else ``none``."""
    looks: bool = False
    """Whether the factors are looked at first: if they hold nothing but small whole numbers, their product is formed
    exactly (`exact.whole_floats`)."""

    def launch(self, a: Any, b: Any, c: Any, accumulate: bool, stream: Any) -> None:
        """Enqueue the product of device arrays, or of matrices with open addresses; ``kernel`` is not None."""
        assert self.kernel is not None
        if self.half == "none":
            self.kernel.launch(a, b, c, accumulate, stream)
            return
        self.kernel.launch(a, b, c, accumulate, stream, lower=True)
        self._mirror(c, stream)

    def launch_whole(self, a: Any, b: Any, c: Any, accumulate: bool, stream: Any) -> bool:
        """The same, if the factors hold nothing but small whole numbers; whether that was so. Waits for the stream."""
        from tilewright.kernels.gemm.exact import whole_floats

        done = whole_floats.multiply(a, b, c, accumulate, stream, lower=self.half != "none")
        if done:
            self._mirror(c, stream)
        return done

    def _mirror(self, c: Any, stream: Any) -> None:
        if self.half == "mirrored":
            from tilewright.kernels.gemm.cores.repitch import as_bits
            from tilewright.kernels.passes.transpose_device import transpose

            bits = as_bits(c)
            transpose(bits, bits, stream, swap=False, same=True)


class MatmulOptions(TypedDict, total=False):
    """The keywords of `matmul`."""

    accumulate: bool
    transpose_a: bool
    transpose_b: bool
    dtype: Any
    precision: PrecisionName
    device: DeviceName
    stream: Any
    lower: bool


@overload
def matmul(
    a: HostArray, b: HostArray, out: HostArray | None = None, **options: Unpack[MatmulOptions]
) -> HostArray: ...
@overload
def matmul(a: DeviceArray, b: DeviceArray, out: Out, **options: Unpack[MatmulOptions]) -> Out: ...
@overload
def matmul(
    a: DeviceArray, b: DeviceArray, out: None = None, **options: Unpack[MatmulOptions]
) -> DeviceArray: ...
def matmul(
    a: Any,
    b: Any,
    out: Any = None,
    *,
    accumulate: bool = False,
    transpose_a: bool = False,
    transpose_b: bool = False,
    dtype: Any = None,
    precision: PrecisionName = "full",
    device: DeviceName = "auto",
    stream: Any = None,
    lower: bool = False,
) -> Any:
    """``op(A) op(B)`` on one device, as `numpy.matmul` would give it.

    Parameters
    ----------
    a, b
        Matrices (two dimensions) of any strides, both NumPy arrays or both device arrays (anything with
        ``__cuda_array_interface__``: Numba, CuPy, PyTorch). Neither op(A) nor op(B) is ever stored. Elements of device
        arrays lie at multiples of their size (complex numbers: half of it), ``out``'s too.
    out
        An m × n array of the result's dtype, of the same kind and on the same device, sharing no memory with a or b;
        every element is written. Without it a new one is made (for device arrays a Numba device array, a CuPy array
        where ``a`` is one, and of bfloat16 a PyTorch tensor where ``a`` is one).
    accumulate
        Add the product to ``out``, in its own dtype, instead of overwriting it. With exact integers this wraps; with
        floating point the sum is rounded once more.
    dtype
        Compute and store in this type, to which both inputs must cast ``same_kind``: int32 matrices with
        ``dtype=int64`` give sums that do not wrap at 2**31. The default is `numpy.result_type`.
    precision
        ``full`` multiplies float32 as float32. ``split``, ``tf32``, ``bf16`` and ``fp16`` allow (and never require) a
        float32 product on the tensor cores, ``split`` also one of float64, complex64 or complex128, with no less
        accuracy; where a device or a shape has no such kernel, and on the CPU, it is computed in full. ``fp16`` makes
        operands above 65504 infinite, and rounds those below 6.1e-5 to multiples of 6e-8.
    device
        ``auto`` (the GPU if there is one), ``cuda`` or ``cpu``. Device arrays stay where they are.
    stream
        The stream to launch on. The default is the one that the arrays were exported with, else the default stream. For
        device arrays the function returns before the product is finished.
    lower
        Only elements on and below the diagonal of a square product are wanted; those above it may get any numbers.
        Kernels of large products then leave out half of the work, as BLAS's ``syrk`` does.

    Notes
    -----
    A large device array by its own transpose is computed so too, and mirrored: the product is symmetric to the bit.

    Integers of every width wrap modulo 2**bits. float16 and bfloat16 products (of ml_dtypes' arrays, or
    PyTorch's tensors) are added up in float32 and rounded once; with ``dtype="float32"`` they are not rounded.
    float8_e4m3fn and float8_e5m2 (of the same libraries) are multiplied by each other alone, to float32. Hopper's
    tensor cores keep some 14 bits of their sums, so sums of 128 products are carried to float32: an element may be off
    by 0.0165 ``|A| |B|``, of numbers of about equal sizes by far less (docs/accuracy.md). Elsewhere, and where matrices
    are small, float8 is as accurate as float16 is.
    Large float32 and float64 matrices of small whole numbers are multiplied exactly, and rounded once, on GPUs that
    have int8 tensor cores; to see that they are such, the call waits for what was enqueued on the stream before.
    NaN and infinity propagate as IEEE 754 says. k = 0 gives zeros, and an empty m or n an empty array.

    Returns ``out``, or the new array. Raises ShapeError, DTypeError, OptionError, OutputError,
    DeviceUnavailableError or DeviceMemoryError before anything is launched. Masked arrays are refused.

    Examples
    --------
    >>> import numpy as np
    >>> from tilewright.kernels import matmul
    >>> a = np.arange(6, dtype=np.int32).reshape(2, 3)
    >>> matmul(a, a, transpose_b=True, dtype="int64", device="cpu")
    array([[ 5, 14],
           [14, 50]])
    """
    accumulate = check_flag("accumulate", accumulate)
    transpose_a, transpose_b = check_flag("transpose_a", transpose_a), check_flag("transpose_b", transpose_b)
    lower = check_flag("lower", lower)
    check_choice("precision", precision, PRECISIONS)
    if stream is not None:
        check_stream(stream)
    on_device = _on_one_side(a, b, out)
    if accumulate and out is None:
        raise OptionError("accumulate=True adds to out, and no out was given")
    where = device_choice.resolve_device(device, device_arrays=on_device)
    if on_device:
        return _on_device(a, b, out, accumulate, transpose_a, transpose_b, dtype, precision, stream, lower)

    a, b, out = _host_operands(a, b, out)
    m, n, _ = check.product_shape(a.shape, b.shape, transpose_a, transpose_b)
    check.half(m, n, lower)
    result = check.result_dtype(a.dtype, b.dtype, dtype)
    check.precision(precision, result)
    if out is None:
        out = new_host_array(f"a product of {m} × {n}", (m, n), result)
    else:
        if not out.flags.writeable:
            raise OutputError("out is read-only; pass an array that can be written")
        check.output(out.shape, out.strides, out.dtype, m, n, result)
        for name, operand in (("a", a), ("b", b)):
            check.overlap(
                name,
                operand.ctypes.data,
                operand,
                check.span(operand.shape, operand.strides, operand.itemsize),
                out.ctypes.data,
                out,
                check.span(out.shape, out.strides, out.itemsize),
            )
    op_a, op_b = a.T if transpose_a else a, b.T if transpose_b else b
    if where == "cpu":
        from tilewright.kernels.cpu import product as host

        host.matmul(op_a, op_b, out, accumulate=accumulate, lower=lower)
    else:
        _through_device(op_a, op_b, out, accumulate, precision, stream, lower)
    return out


def _on_one_side(a: Any, b: Any, out: Any) -> bool:
    """Whether the arrays are device arrays, all of them; OptionError or OutputError if only some are."""
    # Without a call, as this is asked before each product.
    if type(a) is np.ndarray and type(b) is np.ndarray and (out is None or type(out) is np.ndarray):
        return False
    on_device = is_device_array(a), is_device_array(b)
    if on_device[0] != on_device[1] or (out is not None and is_device_array(out) != on_device[0]):
        kinds = ", ".join(
            f"{name} is {type(array).__module__}.{type(array).__name__}"
            for name, array in (("a", a), ("b", b), ("out", out))
            if array is not None
        )
        error = OptionError if out is None or on_device[0] != on_device[1] else OutputError
        raise error(f"host and device arrays are mixed: {kinds}; bring them all to one side")
    return on_device[0]


def _host_operands(a: Any, b: Any, out: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Inputs as NumPy arrays in the machine's byte order; ``out`` must be one already."""
    operands = [
        array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
        for array in (host_array("a", a), host_array("b", b))
    ]
    if out is not None:
        check_host_out(out, "a and b are")
    return operands[0], operands[1], out


def _hashable(dtype: Any) -> Any:
    """``dtype`` as the caller gave it, for decisions to be remembered by. DTypeError for what has no hash, such as the
    list of a structured type's fields: no element type is spelt so."""
    try:
        hash(dtype)
    except TypeError:
        return check.element(dtype)
    return dtype


def _operand(layout: Layout) -> Operand:
    shape, strides, dtype, remainder = layout
    down, across = strides
    size = dtype.itemsize
    return Operand(shape[0], shape[1], dtype, (down // size, across // size), alignment(remainder))


def _transposed(layout: Layout) -> Layout:
    shape, strides, dtype, remainder = layout
    return shape[::-1], strides[::-1], dtype, remainder


def _row_major(m: int, n: int, dtype: np.dtype) -> Layout:
    return (m, n), (n * dtype.itemsize, dtype.itemsize), dtype, 0


@functools.lru_cache(maxsize=4096)
def _decide(
    a: Layout,
    b: Layout,
    out: Layout | None,
    accumulate: bool,
    transpose_a: bool,
    transpose_b: bool,
    dtype: Any,
    precision: str,
    half: str,
    home: int,
    generation: int,
) -> Decision:
    """Check a product of these layouts and select its kernel on GPU ``home``; a new `tuning.generation` decides anew.

    half: as `Decision.half`, as far as the caller knows: ``mirrored`` where both operands are one matrix.
    GPUs of one compute capability decide for themselves: what was measured is of their model.
    """
    from tilewright.kernels.gemm.select import select

    m, n, k = check.product_shape(a[0], b[0], transpose_a, transpose_b)
    check.half(m, n, half == "lower")
    result = check.result_dtype(a[2], b[2], dtype)
    check.precision(precision, result)
    for name, (shape, strides, found, remainder) in (("a", a), ("b", b)):
        if not found.isnative:
            raise DTypeError(
                f"{name} holds {found} in foreign byte order, which no GPU reads; convert it first"
            )
        check.layout(name, strides, found)
        check_alignment(name, shape, strides, found, remainder)
    if out is not None:
        check.output(out[0], out[1], out[2], m, n, result)
        check.layout("out", out[1], out[2])
        check_alignment("out", *out)
    spans = tuple(check.span(x[0], x[1], x[2].itemsize) for x in (a, b, out) if x is not None)
    if m * n == 0 or (accumulate and k == 0):
        return Decision((m, n), result, spans, None)
    problem = Problem(
        a=_operand(_transposed(a) if transpose_a else a),
        b=_operand(_transposed(b) if transpose_b else b),
        c=_operand(_row_major(m, n, result) if out is None else out),
        accumulate=accumulate,
        precision=precision,
        capability=device_choice.capability(home),
        model=device_choice.model(home),
    )
    kernel = select(problem)
    if not kernel.halves or (half == "mirrored" and (accumulate or n < LEAST_MIRRORED or k < LEAST_MIRRORED)):
        half = "none"
    return Decision((m, n), result, spans, kernel, half, _looks(problem))


def _looks(problem: Problem) -> bool:
    if problem.c.dtype.kind != "f" or problem.capability is None:
        return False
    from tilewright.kernels.gemm.exact import whole_floats

    return whole_floats.fits(problem)


def _open_matrix(base: int, layout: Layout) -> Any:
    """A matrix of the given layout with a `Place` for its address."""
    from tilewright.kernels.gemm.cores.repitch import Matrix

    shape, strides, dtype, remainder = layout
    place: Any = Place(base, 0, remainder)
    return Matrix(place, (shape[0], shape[1]), (strides[0], strides[1]), dtype)


@functools.lru_cache(maxsize=4096)
def _recorded(
    a: Layout,
    b: Layout,
    out: Layout,
    accumulate: bool,
    transpose_a: bool,
    transpose_b: bool,
    dtype: Any,
    precision: str,
    half: str,
    home: int,
    generation: int,
    same: bool,
) -> tuple[Decision, Plan | None]:
    """The decision about a product on GPU ``home``, the current one, and its launches if its kernel can be recorded.

    Compiles the kernels. same: whether a and b begin at one address.
    """
    decision = _decide(
        a, b, out, accumulate, transpose_a, transpose_b, dtype, precision, half, home, generation
    )
    kernel = decision.kernel
    if kernel is None or not kernel.recordable or device_choice.SIMULATOR:
        return decision, None
    bases = (0, 0 if same else 1, 2)  # what takes one matrix twice is done once
    open_a, open_b, open_out = (
        _open_matrix(base, layout) for base, layout in zip(bases, (a, b, out), strict=True)
    )
    recording = Recording()
    decision.launch(
        open_a.transposed() if transpose_a else open_a,
        open_b.transposed() if transpose_b else open_b,
        open_out,
        accumulate,
        recording,
    )
    return decision, recording.plan()


def prepare(
    a: Any,
    b: Any,
    out: Any,
    *,
    accumulate: bool = False,
    transpose_a: bool = False,
    transpose_b: bool = False,
    dtype: Any = None,
    precision: PrecisionName = "full",
    stream: Any = None,
    lower: bool = False,
) -> None:
    """Compile and load the kernels with which `matmul` would multiply these device arrays on ``stream``, and make its
    scratch memory. No element is looked at, and nothing is launched.

    The arrays lie on the current device. Options are `matmul`'s. Raises what it raises for them.
    """
    arrays = [(array, memory_of(array)) for array in (a, b, out)]
    layout_a, layout_b, layout_out = (memory.layout for _, memory in arrays)
    half = _half(lower, arrays[0][1], arrays[1][1], transpose_a, transpose_b)
    options = (accumulate, transpose_a, transpose_b, _hashable(dtype), precision, half)
    home = device_choice.current_device()
    pointers = [memory.pointer for _, memory in arrays]
    same = pointers[0] == pointers[1]
    decision, plan = _recorded(layout_a, layout_b, layout_out, *options, home, tuning.generation, same)
    queue = as_stream(stream)
    if decision.looks:
        _launch(decision, arrays, accumulate, transpose_a, transpose_b, Rehearsal(queue), whole=True)
    if plan is not None:
        if plan.scratch_nbytes:
            with borrowed(plan.scratch_nbytes, queue) as scratch:
                launch.make_ready(plan, (*pointers, scratch))
        else:
            launch.make_ready(plan, pointers)
    elif decision.kernel is not None and not device_choice.SIMULATOR:
        _launch(decision, arrays, accumulate, transpose_a, transpose_b, Rehearsal(queue))


def describe(a: Any, b: Any, c: Any, *, accumulate: bool = False, precision: str = "full") -> Problem:
    """The problem ``c (+)= a b`` of three device arrays, as `GemmKernel.supports` takes it."""
    memories = [memory_of(array) for array in (a, b, c)]
    home = device_index(memories[2])
    of_a, of_b, of_c = (_operand(memory.layout) for memory in memories)
    here = device_choice.capability(home), device_choice.model(home)
    return Problem(of_a, of_b, of_c, accumulate, precision, *here)


def _new_output(like: Any, shape: tuple[int, int], dtype: np.dtype, stream: Any) -> Any:
    """An uninitialised device array: CuPy's if ``like`` is, PyTorch's for bfloat16 if ``like`` is, else Numba's."""
    library = type(like).__module__.partition(".")[0]
    if library == "cupy":
        import cupy

        return cupy.empty(shape, dtype)
    if library == "torch" and dtype == BFLOAT16:  # PyTorch takes bfloat16 from no other library
        import torch

        return torch.empty(shape, dtype=torch.bfloat16, device=like.device)
    return cuda.device_array(shape, dtype, stream=stream)


def _on_device(
    a: Any,
    b: Any,
    out: Any,
    accumulate: bool,
    transpose_a: bool,
    transpose_b: bool,
    dtype: Any,
    precision: str,
    stream: Any,
    lower: bool = False,
) -> Any:
    memory_a, memory_b = memory_of(a), memory_of(b)
    memory_out = None if out is None else memory_of(out)
    if device_choice.device_count() > 1:
        home = _home((memory_a, memory_b) if memory_out is None else (memory_a, memory_b, memory_out))
        if home != device_choice.current_device():
            with cuda.gpus[home]:
                return _on_device(
                    a, b, out, accumulate, transpose_a, transpose_b, dtype, precision, stream, lower
                )
    home = device_choice.current_device()
    layout_a, layout_b = memory_a.layout, memory_b.layout
    half = _half(lower, memory_a, memory_b, transpose_a, transpose_b)
    same = memory_a.pointer == memory_b.pointer
    options = (accumulate, transpose_a, transpose_b, _hashable(dtype), precision, half)
    if memory_out is None:
        decision = _decide(layout_a, layout_b, None, *options, home, tuning.generation)
        queue = launch_stream(stream, (memory_a, memory_b))
        out = _new_output(a, decision.shape, decision.dtype, queue)
        memory_out = memory_of(out)
        decision, plan = _recorded(
            layout_a, layout_b, memory_out.layout, *options, home, tuning.generation, same
        )
    else:
        decision, plan = _recorded(
            layout_a, layout_b, memory_out.layout, *options, home, tuning.generation, same
        )
        if memory_out.read_only:
            raise OutputError("out is read-only; pass an array that can be written")
        for name, memory, span in (("a", memory_a, decision.spans[0]), ("b", memory_b, decision.spans[1])):
            check.overlap(
                name, memory.pointer, memory, span, memory_out.pointer, memory_out, decision.spans[2]
            )
        queue = launch_stream(stream, (memory_a, memory_b, memory_out))
    arrays = (a, memory_a), (b, memory_b), (out, memory_out)
    if decision.looks and _launch(decision, arrays, accumulate, transpose_a, transpose_b, queue, whole=True):
        return out
    if plan is not None:
        places = (memory_a.pointer, memory_b.pointer, memory_out.pointer)
        if plan.scratch_nbytes:
            with borrowed(plan.scratch_nbytes, queue) as scratch:
                launch.replay(plan, (*places, scratch), queue)
        else:
            launch.replay(plan, places, queue)
    elif decision.kernel is not None:
        _launch(decision, arrays, accumulate, transpose_a, transpose_b, queue)
    return out


def _home(memories: Sequence[Memory]) -> int:
    """The GPU that holds arrays; the current one if all are empty. OutputError where several do."""
    homes = {device_index(memory) for memory in memories if memory.size}
    if len(homes) > 1:
        raise OutputError(
            f"the arrays lie on GPUs {sorted(homes)}; a product takes one: copy them to the same"
        )
    return homes.pop() if homes else device_choice.current_device()


def _half(lower: bool, a: Memory, b: Memory, transpose_a: bool, transpose_b: bool) -> str:
    """``lower`` where the caller wants no more, ``mirrored`` where op(B) is the transpose of op(A), in the same memory;
    else ``none``."""
    if lower:
        return "lower"
    left, right = (a.layout, b.layout) if transpose_a == transpose_b else (a.layout, _transposed(b.layout))
    one = a.pointer == b.pointer and left == _transposed(right)
    return "mirrored" if one else "none"


def _launch(
    decision: Decision,
    arrays: Sequence[tuple[Any, Any]],
    accumulate: bool,
    transpose_a: bool,
    transpose_b: bool,
    stream: Any,
    *,
    whole: bool = False,
) -> bool:
    """Launch what was decided on a, b and out, each given with its memory. whole: only if the factors hold nothing but
    small whole numbers; whether that was so."""
    a, b, out = (as_device_array(array, memory) for array, memory in arrays)
    left, right = transposed(a) if transpose_a else a, transposed(b) if transpose_b else b
    if whole:
        return decision.launch_whole(left, right, out, accumulate, stream)
    decision.launch(left, right, out, accumulate, stream)
    return True


def _through_device(
    a: np.ndarray,
    b: np.ndarray,
    out: np.ndarray,
    accumulate: bool,
    precision: str,
    stream: Any,
    lower: bool = False,
) -> None:
    """Copy NumPy arrays to the GPU, multiply them there and copy the product into ``out``."""
    queue = as_stream(stream)
    device_a, device_b = (to_device(_one_piece(array), queue) for array in (a, b))
    direct = out.flags.c_contiguous
    if accumulate:
        device_out = to_device(np.ascontiguousarray(out), queue)
    else:
        device_out = cuda.device_array(out.shape, out.dtype, stream=queue)
    _on_device(device_a, device_b, device_out, accumulate, False, False, out.dtype, precision, queue, lower)
    if direct and out.size:
        to_host(device_out, out, queue)
    elif out.size:
        out[...] = device_out.copy_to_host(stream=queue)
    if queue:
        queue.synchronize()


def _one_piece(array: np.ndarray) -> np.ndarray:
    """The array if its elements fill one region of memory, in either order, else a row-major copy."""
    return array if array.flags.forc else np.ascontiguousarray(array)


def kernel_name(
    a: Any,
    b: Any,
    out: Any = None,
    *,
    accumulate: bool = False,
    transpose_a: bool = False,
    transpose_b: bool = False,
    dtype: Any = None,
    precision: PrecisionName = "full",
    device: DeviceName = "auto",
) -> str:
    """The name of the kernel that `matmul` would choose, for reports; ``cpu`` for the CPU twin.

    Only shapes, strides, dtypes and addresses are looked at.
    """
    on_device = _on_one_side(a, b, out)
    if device_choice.resolve_device(device, device_arrays=on_device) == "cpu":
        return "cpu"
    home = device_choice.current_device()
    if on_device:
        memories = [None if array is None else memory_of(array) for array in (a, b, out)]
        if device_choice.device_count() > 1:
            home = _home([memory for memory in memories if memory is not None])
        layouts = [None if memory is None else memory.layout for memory in memories]
    else:
        a, b = host_array("a", a), host_array("b", b)
        check.product_shape(a.shape, b.shape, transpose_a, transpose_b)
        layouts = [_copied_layout(a.T if transpose_a else a), _copied_layout(b.T if transpose_b else b), None]
        transpose_a = transpose_b = False
    options = (accumulate, transpose_a, transpose_b, _hashable(dtype), precision, "none")
    with contextlib.nullcontext() if home == device_choice.current_device() else cuda.gpus[home]:
        decision = _decide(layouts[0], layouts[1], layouts[2], *options, home, tuning.generation)
    return "none" if decision.kernel is None else decision.kernel.name


def _copied_layout(array: np.ndarray) -> Layout:
    """How a NumPy matrix lies on the device once `_through_device` has copied it, in the machine's byte order."""
    if not array.dtype.isnative:
        array = np.empty_like(array, array.dtype.newbyteorder("="))  # whose strides are those of ``astype``
    row_major = (array.shape[1] * array.itemsize, array.itemsize)
    return array.shape, array.strides if array.flags.forc else row_major, array.dtype, 0
