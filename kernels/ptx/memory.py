"""Access to global and shared memory: arrays at an address, several elements at once, counters in shared memory."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from tilewright.kernels.ptx.lowering import SHARED_SPACE, U32, are_arrays, element_pointer, scalar_instruction

VECTOR_NBYTES = 16
"""The widest access of one thread: 128 bits."""


@intrinsic
def address_of(typingctx, array):  # type: ignore[no-untyped-def]
    """The address (uint64) of the first element of an array in global memory."""
    if not are_arrays(array):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, value=arguments[0]).data
        return builder.ptrtoint(data, ir.IntType(64))

    return types.uint64(array), generate


@intrinsic
def shared_address(typingctx, array):  # type: ignore[no-untyped-def]
    """The address (uint32, in the block's shared window) of the first element of a shared array."""
    if not are_arrays(array):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, value=arguments[0]).data
        shared = builder.addrspacecast(data, ir.PointerType(data.type.pointee, SHARED_SPACE))
        return builder.ptrtoint(shared, ir.IntType(32))

    return types.uint32(array), generate


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


def _elements_per_vector(context: Any, array_type: Any) -> int:
    nbytes = context.get_abi_sizeof(context.get_data_type(array_type.dtype))
    return VECTOR_NBYTES // nbytes


@intrinsic
def load_vector(typingctx, registers, register_index, array, index):  # type: ignore[no-untyped-def]
    """One 128-bit load: ``registers[register_index...] = array[index...]``, 16 / itemsize elements.

    ``array`` lies in global or shared memory (LLVM tells which: ``ld.global.v4`` or ``ld.shared.v4``); the
    address of ``array[index]`` must be a multiple of 16 bytes. ``registers`` has the type of ``array``, or
    its real type where ``array`` is complex: then ``register_index`` counts reals.
    """
    if not are_arrays(registers, array) or not _same_scalar(registers, array):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        registers_type, register_index_type, array_type, index_type = signature.args
        element = context.get_data_type(registers_type.dtype)
        lanes = _elements_per_vector(context, registers_type)
        source = element_pointer(context, builder, array_type, arguments[2], index_type, arguments[3])
        vector_type = ir.VectorType(_scalar(element), lanes * _scalars(element))
        vector = builder.load(builder.bitcast(source, vector_type.as_pointer()), align=VECTOR_NBYTES)
        target = element_pointer(
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
    """One 128-bit store, ``array[index...] = registers[register_index...]``: ``load_vector``'s mirror."""
    if not are_arrays(registers, array) or not _same_scalar(registers, array):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array_type, index_type, registers_type, register_index_type = signature.args
        element = context.get_data_type(registers_type.dtype)
        lanes = _elements_per_vector(context, registers_type)
        source = element_pointer(
            context, builder, registers_type, arguments[2], register_index_type, arguments[3]
        )
        source = builder.bitcast(source, _scalar(element).as_pointer())
        vector_type = ir.VectorType(_scalar(element), lanes * _scalars(element))
        vector: Any = ir.Constant(vector_type, ir.Undefined)
        for lane in range(vector_type.count):
            value = builder.load(builder.gep(source, [ir.Constant(ir.IntType(32), lane)]))
            vector = builder.insert_element(vector, value, ir.Constant(ir.IntType(32), lane))
        target = element_pointer(context, builder, array_type, arguments[0], index_type, arguments[1])
        builder.store(vector, builder.bitcast(target, vector_type.as_pointer()), align=VECTOR_NBYTES)
        return context.get_dummy_value()

    return types.void(array, index, registers, register_index), generate


def _same_scalar(registers: Any, array: Any) -> bool:
    return registers.dtype in (array.dtype, getattr(array.dtype, "underlying_float", None))


def _scalar(element: ir.Type) -> ir.Type:
    """The machine type under an element type: a complex number is a struct of two floats."""
    return element.elements[0] if isinstance(element, ir.LiteralStructType) else element


def _scalars(element: ir.Type) -> int:
    return len(element.elements) if isinstance(element, ir.LiteralStructType) else 1


@intrinsic
def load_pair(typingctx, array, index):  # type: ignore[no-untyped-def]
    """``(array[index], array[index + 1])`` in one access, aligned to two elements."""
    if not are_arrays(array):
        return None
    element_type = array.dtype
    result = types.UniTuple(element_type, 2)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array_type, index_type = signature.args
        element = context.get_data_type(element_type)
        vector_type = ir.VectorType(element, 2)
        source = element_pointer(context, builder, array_type, arguments[0], index_type, arguments[1])
        nbytes = 2 * context.get_abi_sizeof(element)
        vector = builder.load(builder.bitcast(source, vector_type.as_pointer()), align=nbytes)
        lanes = [builder.extract_element(vector, ir.Constant(ir.IntType(32), lane)) for lane in range(2)]
        return context.make_tuple(builder, result, lanes)

    return result(array, index), generate


@intrinsic
def store_pair(typingctx, array, index, first, second):  # type: ignore[no-untyped-def]
    """``array[index], array[index + 1] = first, second`` in one access, aligned to two elements."""
    if not are_arrays(array):
        return None
    element_type = array.dtype

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array_type, index_type = signature.args[:2]
        element = context.get_data_type(element_type)
        vector_type = ir.VectorType(element, 2)
        vector: Any = ir.Constant(vector_type, ir.Undefined)
        for lane in range(2):
            vector = builder.insert_element(vector, arguments[2 + lane], ir.Constant(ir.IntType(32), lane))
        target = element_pointer(context, builder, array_type, arguments[0], index_type, arguments[1])
        nbytes = 2 * context.get_abi_sizeof(element)
        builder.store(vector, builder.bitcast(target, vector_type.as_pointer()), align=nbytes)
        return context.get_dummy_value()

    return types.void(array, index, element_type, element_type), generate


@intrinsic
def load_shared_pair(typingctx, shared):  # type: ignore[no-untyped-def]
    """The two uint32 at a shared address (uint32) that is a multiple of 8, in one access."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        function = ir.FunctionType(ir.LiteralStructType([word] * 2), [word])
        text = "ld.shared.v2.u32 {$0, $1}, [$2];"
        assembly = ir.InlineAsm(function, text, "=r,=r,r,~{memory}", side_effect=True)
        address = context.cast(builder, arguments[0], signature.args[0], types.uint32)
        loaded = builder.call(assembly, [address])
        words = [builder.extract_value(loaded, i) for i in range(2)]
        return context.make_tuple(builder, signature.return_type, words)

    return types.UniTuple(types.uint32, 2)(types.uint32), generate


load_shared_word = scalar_instruction(
    "ld.shared.u32 $0, [$1];",
    "=r,r",
    (U32,),
    U32,
    description="``load_shared_word(address)``: the uint32 at a shared address, a multiple of 4.",
)

store_shared_words = scalar_instruction(
    "st.shared.v2.u32 [$0], {$1, $2};",
    "r,r,r",
    (U32, U32, U32),
    description="``store_shared_words(address, first, second)``: two words to a shared address, a multiple of 8.",
)

store_shared_quad = scalar_instruction(
    "st.shared.v4.u32 [$0], {$1, $2, $3, $4};",
    "r,r,r,r,r",
    (U32, U32, U32, U32, U32),
    description="``store_shared_quad(address, a, b, c, d)``: four uint32 to a shared address, a multiple of 16.",
)

shared_add = scalar_instruction(
    "red.shared.add.u32 [$0], $1;",
    "r,r",
    (U32, U32),
    description="``shared_add(address, amount)``: an atomic addition that returns nothing, so no lane waits for it.",
)
shared_fetch_add = scalar_instruction(
    "atom.shared.add.u32 $0, [$1], $2;",
    "=r,r,r",
    (U32, U32),
    U32,
    description="``shared_fetch_add(address, amount)``: an atomic addition that returns the value before it.",
)
shared_fetch_and = scalar_instruction(
    "atom.shared.and.b32 $0, [$1], $2;",
    "=r,r,r",
    (U32, U32),
    U32,
    description="``shared_fetch_and(address, mask)``: an atomic bitwise and that returns the value before it.",
)

load_fresh = scalar_instruction(
    "ld.relaxed.gpu.global.s64 $0, [$1];",
    "=l,l",
    (types.uint64,),
    types.int64,
    description="``load_fresh(address)``: an int64 as other blocks have left it by now, from no cache of this one.",
)
