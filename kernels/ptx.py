"""Every intrinsic and inline-PTX wrapper; nothing else in the project has any.

Numba's scalar language reaches neither 128-bit memory accesses nor the asynchronous copies and tensor-core
instructions. Each function here is an ``@intrinsic``, callable from a ``cuda.jit`` kernel, that lowers to the one
instruction its docstring names. The simulator cannot run them: a module that imports this one has a portable
sibling.

Arrays are addressed by element offsets from their first element, whatever their shape and strides: the caller
knows its layout, and one multiply-add is cheaper than a two-dimensional index. Unsigned offsets are
zero-extended, so 32-bit offsets reach 2^32 elements. "Registers" means a ``cuda.local.array`` whose every index
is a compile-time constant: LLVM then keeps it in registers.

Sections: vector loads and stores; asynchronous copies (``cp.async``); double-precision tensor cores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

VECTOR_NBYTES = 16
"""The widest access of one thread: 128 bits."""


def _element_pointer(
    context: Any, builder: Any, array_type: Any, array: Any, index_type: Any, index: Any
) -> Any:
    """Pointer to element ``index`` of ``array`` counted from its first, strides ignored."""
    data = context.make_array(array_type)(context, builder, value=array).data
    wide = ir.IntType(64)
    if index.type.width < 64:
        index = builder.sext(index, wide) if index_type.signed else builder.zext(index, wide)
    return builder.gep(data, [index])


def _require_array(*array_types: Any) -> bool:
    return all(isinstance(array_type, types.Array) for array_type in array_types)


# --- Vector loads and stores -------------------------------------------------------------------------------------


def _elements_per_vector(context: Any, array_type: Any) -> int:
    nbytes = context.get_abi_sizeof(context.get_data_type(array_type.dtype))
    return VECTOR_NBYTES // nbytes


@intrinsic
def load_vector(typingctx, registers, register_index, array, index):  # type: ignore[no-untyped-def]
    """``registers[register_index + t] = array[index + t]`` for the 16 / itemsize elements of one 128-bit load.

    ``array`` lies in global or shared memory (LLVM tells which: ``ld.global.v4`` or ``ld.shared.v4``); the
    address of ``array[index]`` must be a multiple of 16 bytes. Both arrays have the same element type.
    """
    if not _require_array(registers, array) or registers.dtype != array.dtype:
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        registers_type, register_index_type, array_type, index_type = signature.args
        lanes = _elements_per_vector(context, array_type)
        element = context.get_data_type(array_type.dtype)
        source = _element_pointer(context, builder, array_type, arguments[2], index_type, arguments[3])
        vector_type = ir.VectorType(_scalar(element), lanes * _scalars(element))
        vector = builder.load(builder.bitcast(source, vector_type.as_pointer()), align=VECTOR_NBYTES)
        target = _element_pointer(
            context, builder, registers_type, arguments[0], register_index_type, arguments[1]
        )
        target = builder.bitcast(target, _scalar(element).as_pointer())
        for lane in range(vector_type.count):
            value = builder.extract_element(vector, ir.Constant(ir.IntType(32), lane))
            builder.store(value, builder.gep(target, [ir.Constant(ir.IntType(32), lane)]))
        return context.get_dummy_value()

    return types.void(registers, register_index, array, index), generate


@intrinsic
def store_vector(typingctx, array, index, registers, register_index):  # type: ignore[no-untyped-def]
    """``array[index + t] = registers[register_index + t]``, one 128-bit store; the mirror of ``load_vector``."""
    if not _require_array(registers, array) or registers.dtype != array.dtype:
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array_type, index_type, registers_type, register_index_type = signature.args
        lanes = _elements_per_vector(context, array_type)
        element = context.get_data_type(array_type.dtype)
        source = _element_pointer(
            context, builder, registers_type, arguments[2], register_index_type, arguments[3]
        )
        source = builder.bitcast(source, _scalar(element).as_pointer())
        vector_type = ir.VectorType(_scalar(element), lanes * _scalars(element))
        vector: Any = ir.Constant(vector_type, ir.Undefined)
        for lane in range(vector_type.count):
            value = builder.load(builder.gep(source, [ir.Constant(ir.IntType(32), lane)]))
            vector = builder.insert_element(vector, value, ir.Constant(ir.IntType(32), lane))
        target = _element_pointer(context, builder, array_type, arguments[0], index_type, arguments[1])
        builder.store(vector, builder.bitcast(target, vector_type.as_pointer()), align=VECTOR_NBYTES)
        return context.get_dummy_value()

    return types.void(array, index, registers, register_index), generate


def _scalar(element: ir.Type) -> ir.Type:
    """The machine type under an element type: a complex number is a struct of two floats."""
    return element.elements[0] if isinstance(element, ir.LiteralStructType) else element


def _scalars(element: ir.Type) -> int:
    return len(element.elements) if isinstance(element, ir.LiteralStructType) else 1


# --- Asynchronous copies -----------------------------------------------------------------------------------------


def _copy_async(nbytes: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The two forms of ``cp.async`` of ``nbytes`` (4, 8 or 16): unconditional, and copy-or-zero.

    16-byte copies go past the first-level cache (``.cg``); smaller ones may not (``.ca``).
    """
    cache = "cg" if nbytes == VECTOR_NBYTES else "ca"

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        shared_type, shared_index_type, source_type, index_type = signature.args[:4]
        target = _element_pointer(
            context, builder, shared_type, arguments[0], shared_index_type, arguments[1]
        )
        target = builder.addrspacecast(target, ir.PointerType(target.type.pointee, 3))
        origin = _element_pointer(context, builder, source_type, arguments[2], index_type, arguments[3])
        operands = [builder.ptrtoint(target, ir.IntType(32)), builder.ptrtoint(origin, ir.IntType(64))]
        text = f"cp.async.{cache}.shared.global [$0], [$1], {nbytes}"
        if len(arguments) == 5:
            wanted = builder.icmp_signed("!=", arguments[4], ir.Constant(arguments[4].type, 0))
            whole, nothing = ir.Constant(ir.IntType(32), nbytes), ir.Constant(ir.IntType(32), 0)
            operands.append(builder.select(wanted, whole, nothing))
            text += ", $2"
        constraints = ",".join(["r", "l", "r"][: len(operands)]) + ",~{memory}"
        function = ir.FunctionType(ir.VoidType(), [operand.type for operand in operands])
        builder.call(ir.InlineAsm(function, text + ";", constraints, side_effect=True), operands)
        return context.get_dummy_value()

    @intrinsic
    def copy(typingctx, shared, shared_index, source, index):  # type: ignore[no-untyped-def]
        if not _require_array(shared, source) or shared.dtype != source.dtype:
            return None
        return types.void(shared, shared_index, source, index), emit

    @intrinsic
    def copy_or_zero(typingctx, shared, shared_index, source, index, wanted):  # type: ignore[no-untyped-def]
        if not _require_array(shared, source) or shared.dtype != source.dtype:
            return None
        return types.void(shared, shared_index, source, index, wanted), emit

    return copy, copy_or_zero


# ``copy_async_N(shared, shared_index, source, index)`` starts copying N bytes from ``source[index...]`` to
# ``shared[shared_index...]``; both addresses must be multiples of N bytes. ``copy_async_N_or_zero`` takes one
# argument more, ``wanted``: where it is false nothing is read and the bytes in shared memory become zero. A copy is
# complete for its thread after ``wait_copies``, and for the block after a barrier behind that.
copy_async_4, copy_async_4_or_zero = _copy_async(4)
copy_async_8, copy_async_8_or_zero = _copy_async(8)
copy_async_16, copy_async_16_or_zero = _copy_async(16)


@intrinsic
def commit_copies(typingctx):  # type: ignore[no-untyped-def]
    """``cp.async.commit_group``: everything this thread copied since the last commit becomes one group."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = ir.FunctionType(ir.VoidType(), [])
        builder.call(ir.InlineAsm(function, "cp.async.commit_group;", "~{memory}", side_effect=True), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def wait_copies(typingctx, pending):  # type: ignore[no-untyped-def]
    """``cp.async.wait_group``: wait until at most ``pending`` (a constant) of this thread's groups are under way."""
    if not isinstance(pending, types.IntegerLiteral):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        count = signature.args[0].literal_value
        function = ir.FunctionType(ir.VoidType(), [])
        text = f"cp.async.wait_group {count};"
        builder.call(ir.InlineAsm(function, text, "~{memory}", side_effect=True), [])
        return context.get_dummy_value()

    return types.void(pending), generate


# --- Double-precision tensor cores --------------------------------------------------------------------------


@intrinsic
def global_array(typingctx, address, dtype):  # type: ignore[no-untyped-def]
    """A flat array of ``dtype`` that begins at a global-memory address (an integer). It has no bounds.

    A kernel that takes addresses is compiled once for every layout, and complex numbers can be read as the
    pairs of floats they are; passing arrays would need a compilation for each combination of Numba's layouts.
    """
    if not isinstance(address, types.Integer):
        return None
    array_type = types.Array(dtype.dtype, 1, "C")

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        element = context.get_data_type(array_type.dtype)
        wide = context.cast(builder, arguments[0], signature.args[0], types.uint64)
        # Through the global address space, so that LLVM emits ld.global and st.global, not generic accesses.
        data = builder.addrspacecast(
            builder.inttoptr(wide, ir.PointerType(element, 1)), ir.PointerType(element)
        )
        itemsize = context.get_constant(types.intp, context.get_abi_sizeof(element))
        nothing = context.get_constant(types.intp, 0)
        array = context.make_array(array_type)(context, builder)
        context.populate_array(
            array, data=data, shape=[nothing], strides=[itemsize], itemsize=itemsize, meminfo=None
        )
        return array._getvalue()

    return array_type(address, dtype), generate


def _multiply_native(k: int) -> Callable[..., list[Any]]:
    """``mma.sync.m16n8k{k}`` for float64, which compute capability 9.0 brought."""
    double = ir.DoubleType()
    inputs = [f"${4 + i}" for i in range(3 * k // 4)]
    sums = "{$0, $1, $2, $3}"
    text = (
        f"mma.sync.aligned.m16n8k{k}.row.col.f64.f64.f64.f64 {sums}, "
        f"{{{', '.join(inputs[: k // 2])}}}, {{{', '.join(inputs[k // 2 :])}}}, {sums};"
    )
    constraints = ",".join(["=d"] * 4 + ["d"] * len(inputs) + ["0", "1", "2", "3"])
    function = ir.FunctionType(ir.LiteralStructType([double] * 4), [double] * (len(inputs) + 4))
    instruction = ir.InlineAsm(function, text, constraints)

    def emit(builder: Any, c: list[Any], a: list[Any], b: list[Any]) -> list[Any]:
        result = builder.call(instruction, [*a, *b, *c])
        return [builder.extract_value(result, i) for i in range(4)]

    return emit


def _multiply_8x8x4(k: int) -> Callable[..., list[Any]]:
    """The same product from ``mma.sync.m8n8k4``, the one float64 shape of compute capability 8.0.

    The larger shape's fragments are made of the smaller one's: A's register 2 j + h holds half h of the rows
    at step j of four k, B's register j the same k, and C's registers 2 h and 2 h + 1 half h of the rows.
    """
    double = ir.DoubleType()
    text = "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {$0, $1}, {$2}, {$3}, {$0, $1};"
    function = ir.FunctionType(ir.LiteralStructType([double] * 2), [double] * 4)
    instruction = ir.InlineAsm(function, text, "=d,=d,d,d,0,1")

    def emit(builder: Any, c: list[Any], a: list[Any], b: list[Any]) -> list[Any]:
        sums = list(c)
        for j in range(k // 4):
            for half in range(2):
                low, high = 2 * half, 2 * half + 1
                result = builder.call(instruction, [a[2 * j + half], b[j], sums[low], sums[high]])
                sums[low], sums[high] = (builder.extract_value(result, i) for i in range(2))
        return sums

    return emit


def mma_f64(k: int, *, native: bool, a_strides: tuple[int, int], b_stride: int) -> Callable[..., Any]:
    """``mma(c, c0, a, a0, b, b0)``: a warp adds its 16 × 8 product over ``k`` (4, 8, 16) to registers ``c``.

    The three are float64 register arrays. With g = lane / 4 and t = lane % 4 (PTX ISA, the fragments of
    m16n8k{4,8,16} for float64), and r, s, h counting from 0:

    - ``a[a0 + s * a_strides[0] + h * a_strides[1]]`` is A at row g + 8 h, column t + 4 s (h < 2, s < k / 4);
    - ``b[b0 + s * b_stride]`` is B at row t + 4 s, column g;
    - ``c[c0 + 2 h + r]`` is C at row g + 8 h, column 2 t + r (r < 2).

    ``native`` asks for the instruction of that very shape (compute capability 9.0); without it the product is
    put together from m8n8k4 (8.0).
    """
    multiply = (_multiply_native if native else _multiply_8x8x4)(k)
    a_offsets = [s * a_strides[0] + h * a_strides[1] for s in range(k // 4) for h in range(2)]
    b_offsets = [s * b_stride for s in range(k // 4)]

    @intrinsic
    def mma(typingctx, c, c0, a, a0, b, b0):  # type: ignore[no-untyped-def]
        if not _require_array(c, a, b):
            return None

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            def registers(position: int, offsets: list[int]) -> list[Any]:
                first = _element_pointer(
                    context,
                    builder,
                    signature.args[position],
                    arguments[position],
                    signature.args[position + 1],
                    arguments[position + 1],
                )
                return [builder.gep(first, [ir.Constant(ir.IntType(64), offset)]) for offset in offsets]

            sums = registers(0, [0, 1, 2, 3])
            operands = [
                [builder.load(register) for register in registers(position, offsets)]
                for position, offsets in ((2, a_offsets), (4, b_offsets))
            ]
            result = multiply(builder, [builder.load(register) for register in sums], *operands)
            for value, register in zip(result, sums, strict=True):
                builder.store(value, register)
            return context.get_dummy_value()

        return types.void(c, c0, a, a0, b, b0), generate

    return mma
