"""Every intrinsic and inline-PTX wrapper; nothing else in the project has any.

Numba's scalar language reaches neither 128-bit accesses nor asynchronous copies nor the tensor cores. Each
function here is an ``@intrinsic``, callable from a ``cuda.jit`` kernel, that lowers to the one instruction
its docstring names. The simulator cannot run them: a module that imports this one has a portable sibling.

Arrays are addressed by element offsets from their first element, whatever their shape and strides: the
caller knows its layout, and one multiply-add is cheaper than a two-dimensional index. Unsigned offsets are
zero-extended, so 32-bit offsets reach 2^32 elements. "Registers" means a ``cuda.local.array`` whose every
index is a compile-time constant: LLVM then keeps it in registers.

Sections: unrolling; vector loads and stores; asynchronous copies (``cp.async``); double-precision tensor
cores; Hopper's barriers, clusters and bulk copies; int8 tensor cores of a warp; Hopper's warpgroup tensor
cores; counters in shared memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

VECTOR_NBYTES = 16
"""The widest access of one thread: 128 bits."""
SHARED_SPACE = 3
"""LLVM's number for shared memory."""


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


# --- Unrolling --------------------------------------------------------------------------------------------


@intrinsic
def unroll(typingctx, function, count, arguments):  # type: ignore[no-untyped-def]
    """Call ``function(i, *arguments)`` for i = 0, 1, ... ``count`` - 1, written out at compile time.

    ``count`` is a constant and ``function`` a device function that returns nothing; in each call ``i`` is a
    constant, so what is indexed by it may live in registers. LLVM unrolls short loops by itself, but not one
    whose body holds hundreds of multiply-adds.
    """
    if not isinstance(count, types.IntegerLiteral) or not isinstance(arguments, types.BaseTuple):
        return None
    call = types.void(types.int32, *arguments.types)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        # Compiled as part of the caller: a device function of its own would ask for a GPU to compile for.
        body = context.compile_subroutine(builder, function.dispatcher.py_func, call)
        unpacked = [builder.extract_value(values[2], i) for i in range(len(arguments.types))]
        for i in range(count.literal_value):
            step = [ir.Constant(ir.IntType(32), i), *unpacked]
            context.call_internal(builder, body.fndesc, call, step)
        return context.get_dummy_value()

    return types.void(function, count, arguments), generate


# --- Vector loads and stores ------------------------------------------------------------------------------


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
    if not _require_array(registers, array) or not _same_scalar(registers, array):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        registers_type, register_index_type, array_type, index_type = signature.args
        element = context.get_data_type(registers_type.dtype)
        lanes = _elements_per_vector(context, registers_type)
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
    """One 128-bit store, ``array[index...] = registers[register_index...]``: ``load_vector``'s mirror."""
    if not _require_array(registers, array) or not _same_scalar(registers, array):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array_type, index_type, registers_type, register_index_type = signature.args
        element = context.get_data_type(registers_type.dtype)
        lanes = _elements_per_vector(context, registers_type)
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


def _same_scalar(registers: Any, array: Any) -> bool:
    return registers.dtype in (array.dtype, getattr(array.dtype, "underlying_float", None))


def _scalar(element: ir.Type) -> ir.Type:
    """The machine type under an element type: a complex number is a struct of two floats."""
    return element.elements[0] if isinstance(element, ir.LiteralStructType) else element


def _scalars(element: ir.Type) -> int:
    return len(element.elements) if isinstance(element, ir.LiteralStructType) else 1


# --- Asynchronous copies ----------------------------------------------------------------------------------


@intrinsic
def address_of(typingctx, array):  # type: ignore[no-untyped-def]
    """The address (uint64) of the first element of an array in global memory."""
    if not _require_array(array):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, value=arguments[0]).data
        return builder.ptrtoint(data, ir.IntType(64))

    return types.uint64(array), generate


def _copy_async(nbytes: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The two forms of ``cp.async`` of ``nbytes`` (4, 8 or 16): unconditional, and copy-or-zero.

    16-byte copies go past the first-level cache (``.cg``); smaller ones may not (``.ca``).
    """
    cache = "cg" if nbytes == VECTOR_NBYTES else "ca"

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array_type, index_type = signature.args[:2]
        target = _element_pointer(context, builder, array_type, arguments[0], index_type, arguments[1])
        target = builder.addrspacecast(target, ir.PointerType(target.type.pointee, SHARED_SPACE))
        operands = [builder.ptrtoint(target, ir.IntType(32)), arguments[2]]
        text = f"cp.async.{cache}.shared.global [$0], [$1], {nbytes}"
        if len(arguments) == 4:
            wanted = builder.icmp_signed("!=", arguments[3], ir.Constant(arguments[3].type, 0))
            whole, nothing = ir.Constant(ir.IntType(32), nbytes), ir.Constant(ir.IntType(32), 0)
            operands.append(builder.select(wanted, whole, nothing))
            text += ", $2"
        constraints = ",".join(["r", "l", "r"][: len(operands)]) + ",~{memory}"
        function = ir.FunctionType(ir.VoidType(), [operand.type for operand in operands])
        builder.call(ir.InlineAsm(function, text + ";", constraints, side_effect=True), operands)
        return context.get_dummy_value()

    @intrinsic
    def copy(typingctx, shared, index, address):  # type: ignore[no-untyped-def]
        if not _require_array(shared) or address != types.uint64:
            return None
        return types.void(shared, index, address), emit

    @intrinsic
    def copy_or_zero(typingctx, shared, index, address, wanted):  # type: ignore[no-untyped-def]
        if not _require_array(shared) or address != types.uint64:
            return None
        return types.void(shared, index, address, types.boolean), emit

    return copy, copy_or_zero


# ``copy_async_N(shared, index, address)`` starts copying N bytes from a global address (uint64) to
# ``shared[index...]``; both must be multiples of N bytes. ``copy_async_N_or_zero`` takes one argument more,
# ``wanted``: where it is false nothing is read and the bytes in shared memory become zero. A copy is complete
# for its thread after ``wait_copies``, and for the block after a barrier behind that.
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
    """``cp.async.wait_group``: wait until this thread has at most ``pending`` (a constant) groups under
    way."""
    if not isinstance(pending, types.IntegerLiteral):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        count = signature.args[0].literal_value
        function = ir.FunctionType(ir.VoidType(), [])
        text = f"cp.async.wait_group {count};"
        builder.call(ir.InlineAsm(function, text, "~{memory}", side_effect=True), [])
        return context.get_dummy_value()

    return types.void(pending), generate


# --- Double-precision tensor cores ------------------------------------------------------------------------


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


def mma_f64(k: int, *, native: bool) -> Callable[..., Any]:
    """``mma(c, c0, a, a0, b, b0)``: a warp adds its 16 × 8 product over ``k`` (4, 8, 16) to registers ``c``.

    The three are float64 register arrays. With g = lane / 4 and t = lane % 4 (PTX ISA, the fragments of
    m16n8k{4,8,16} for float64):

    - ``a[a0 + 2 s + h]`` is A at row g + 8 h, column t + 4 s, for h < 2 and s < k / 4;
    - ``b[b0 + s]`` is B at row t + 4 s, column g;
    - ``c[c0 + 2 h + r]`` is C at row g + 8 h, column 2 t + r, for r < 2.

    ``native`` asks for the instruction of that very shape (compute capability 9.0); without it the product is
    put together from m8n8k4 (8.0).
    """
    multiply = (_multiply_native if native else _multiply_8x8x4)(k)

    @intrinsic
    def mma(typingctx, c, c0, a, a0, b, b0):  # type: ignore[no-untyped-def]
        if not _require_array(c, a, b):
            return None

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            def registers(position: int, count: int) -> list[Any]:
                first = _element_pointer(
                    context,
                    builder,
                    signature.args[position],
                    arguments[position],
                    signature.args[position + 1],
                    arguments[position + 1],
                )
                return [builder.gep(first, [ir.Constant(ir.IntType(64), i)]) for i in range(count)]

            sums = registers(0, 4)
            operands = [
                [builder.load(register) for register in registers(position, count)]
                for position, count in ((2, k // 2), (4, k // 4))
            ]
            result = multiply(builder, [builder.load(register) for register in sums], *operands)
            for value, register in zip(result, sums, strict=True):
                builder.store(value, register)
            return context.get_dummy_value()

        return types.void(c, c0, a, a0, b, b0), generate

    return mma


# --- Hopper: barriers in shared memory, clusters and the bulk copy engine ---------------------------------


def _instruction(
    text: str,
    constraints: str,
    arguments: tuple[Any, ...],
    result: Any = types.void,
    description: str = "",
) -> Callable[..., Any]:
    """An ``@intrinsic`` of scalars that is one inline assembly: ``$0`` is the result if there is one."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        returned = ir.VoidType() if result is types.void else context.get_value_type(result)
        function = ir.FunctionType(returned, [value.type for value in values])
        clobbered = ",".join(part for part in (constraints, "~{memory}") if part)
        value = builder.call(ir.InlineAsm(function, text, clobbered, side_effect=True), values)
        return context.get_dummy_value() if result is types.void else value

    def declare(typingctx, *given):  # type: ignore[no-untyped-def]
        return (result(*arguments), generate) if len(given) == len(arguments) else None

    declare.__doc__ = description
    # Numba binds a call's arguments by name, so the signature must show one name for each.
    names = ["typingctx", *(f"argument_{i}" for i in range(len(arguments)))]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    declare.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
    return intrinsic(declare)


@intrinsic
def shared_address(typingctx, array):  # type: ignore[no-untyped-def]
    """The address (uint32, in the block's shared window) of the first element of a shared array."""
    if not _require_array(array):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, value=arguments[0]).data
        shared = builder.addrspacecast(data, ir.PointerType(data.type.pointee, 3))
        return builder.ptrtoint(shared, ir.IntType(32))

    return types.uint32(array), generate


_U32, _U64, _I32 = types.uint32, types.uint64, types.int32

barrier_init = _instruction(
    "mbarrier.init.shared::cta.b64 [$0], $1;",
    "r,r",
    (_U32, _U32),
    description="``barrier_init(barrier, count)``: a phase completes after ``count`` arrivals and all expected bytes.",
)
barrier_init_fence = _instruction(
    "fence.mbarrier_init.release.cluster;",
    "",
    (),
    description="Makes initialised barriers visible to the cluster and to the copy engine.",
)
barrier_expect = _instruction(
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;",
    "r,r",
    (_U32, _U32),
    description="``barrier_expect(barrier, nbytes)``: arrive, and hold the phase open until that many bytes came.",
)
barrier_arrive = _instruction(
    "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, $0, $1;"
    " mbarrier.arrive.shared::cluster.b64 _, [remote]; }",
    "r,r",
    (_U32, _U32),
    description="``barrier_arrive(barrier, rank)``: arrive at the same barrier of the cluster's block ``rank``.",
)
barrier_wait = _instruction(
    "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;"
    " @done bra finished; bra again; finished: }",
    "r,r",
    (_U32, _U32),
    description="``barrier_wait(barrier, parity)``: sleep until the phase of that parity has completed.",
)
cluster_rank = _instruction(
    "mov.u32 $0, %cluster_ctarank;", "=r", (), _U32, description="This block's number in its cluster."
)
cluster_barrier = _instruction(
    "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;",
    "",
    (),
    description="Every thread of every block of the cluster waits for all the others.",
)
tensor_map_acquire = _instruction(
    "fence.proxy.tensormap::generic.acquire.gpu [$0], 128;",
    "l",
    (_U64,),
    description="Lets the copy engine see a tensor map that was written to global memory.",
)
_BULK = "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
tensor_load = _instruction(
    f"{_BULK} [$0], [$1, {{$3, $4, $5}}], [$2];",
    "r,l,r,r,r,r",
    (_U32, _U64, _U32, _I32, _I32, _I32),
    description="``tensor_load(shared, map, barrier, x, y, z)``: the box of a tensor map that begins at (x, y, z), "
    "zeros outside the tensor; its bytes count at the barrier. One thread calls it.",
)
tensor_load_multicast = _instruction(
    f"{_BULK}.multicast::cluster [$0], [$1, {{$3, $4, $5}}], [$2], $6;",
    "r,l,r,r,r,r,h",
    (_U32, _U64, _U32, _I32, _I32, _I32, types.uint16),
    description="The same into every block of the cluster whose bit in the last argument is set, at the same place.",
)

tensor_store = _instruction(
    "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [$0, {$2, $3, $4}], [$1];",
    "l,r,r,r,r",
    (_U64, _U32, _I32, _I32, _I32),
    description="``tensor_store(map, shared, x, y, z)``: a box in shared memory to the tensor at (x, y, z); what lies "
    "outside the tensor is not written. It belongs to the calling thread's open group of bulk stores.",
)
bulk_commit = _instruction(
    "cp.async.bulk.commit_group;", "", (), description="The bulk stores issued so far become one group."
)
copy_engine_fence = _instruction(
    "fence.proxy.async.shared::cta;",
    "",
    (),
    description="Lets the copy engine see what this thread wrote to shared memory.",
)


def bulk_wait(pending: int, *, read: bool) -> Callable[..., Any]:
    """Wait until at most ``pending`` of the thread's groups of bulk stores are under way, or still read shared
    memory."""
    return _instruction(f"cp.async.bulk.wait_group{'.read' if read else ''} {pending};", "", ())


store_matrices = _instruction(
    "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};",
    "r,r,r,r,r",
    (_U32, _U32, _U32, _U32, _U32),
    description="``store_matrices(address, w0, w1, w2, w3)``: a warp's four 8 × 8 matrices of 16 bits to shared "
    "memory. Lane l holds two neighbours of row l / 4 of each, and the address of row l % 8 of matrix l / 8.",
)


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


half_pair = _instruction(
    "cvt.rn.f16x2.f32 $0, $2, $1;",
    "=r,f,f",
    (types.float32, types.float32),
    _U32,
    description="``half_pair(low, high)``: the nearest float16 of both in one word.",
)
bfloat_pair = _instruction(
    "cvt.rn.bf16x2.f32 $0, $2, $1;",
    "=r,f,f",
    (types.float32, types.float32),
    _U32,
    description="``bfloat_pair(low, high)``: the nearest bfloat16 of both in one word.",
)
bfloat_bits = _instruction(
    "cvt.rn.bf16.f32 $0, $1;",
    "=h,f",
    (types.float32,),
    types.uint16,
    description="The 16 bits of the nearest bfloat16, ties to even.",
)


dot_bytes = _instruction(
    "dp4a.u32.s32 $0, $1, $2, $3;",
    "=r,r,r,r",
    (_U32, _I32, _I32),
    _I32,
    description="``dot_bytes(x, y, c)``: c plus the sum of the four unsigned bytes of x times the signed ones of y.",
)
round_to_int = _instruction(
    "cvt.rni.s32.f32 $0, $1;",
    "=r,f",
    (types.float32,),
    _I32,
    description="The nearest integer, ties to even.",
)

float_bits = _instruction(
    "mov.b32 $0, $1;", "=r,f", (types.float32,), _U32, description="The 32 bits of a float32."
)
bits_float = _instruction(
    "mov.b32 $0, $1;", "=f,r", (_U32,), types.float32, description="The float32 of 32 bits."
)
half_bits = _instruction(
    "cvt.rn.f16.f32 $0, $1;",
    "=h,f",
    (types.float32,),
    types.uint16,
    description="The 16 bits of the nearest float16, ties to even.",
)
tf32_bits = _instruction(
    "cvt.rna.tf32.f32 $0, $1;",
    "=r,f",
    (types.float32,),
    _U32,
    description="The 32 bits of the nearest TF32 number, ties away from zero.",
)
tf32_operand = _instruction(
    "{ .reg .pred finite; .reg .f32 size; mov.b32 size, $1; abs.f32 size, size;"
    " setp.lt.f32 finite, size, 0f7F800000; mov.b32 $0, $1; @finite add.u32 $0, $0, 0x1000; }",
    "=r,r",
    (_U32,),
    _U32,
    description="A float32's bits so that the tensor cores, which ignore the low 13, take the number that "
    "``tf32_bits`` gives: two instructions in its place of three.",
)


def register_budget(count: int, *, grow: bool) -> Callable[..., Any]:
    """``setmaxnreg`` for the calling warpgroup: producers give registers up, consumers take them."""
    direction = "inc" if grow else "dec"
    return _instruction(f"setmaxnreg.{direction}.sync.aligned.u32 {count};", "", ())


@intrinsic
def load_pair(typingctx, array, index):  # type: ignore[no-untyped-def]
    """``(array[index], array[index + 1])`` in one access, aligned to two elements."""
    if not _require_array(array):
        return None
    element_type = array.dtype
    result = types.UniTuple(element_type, 2)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array_type, index_type = signature.args
        element = context.get_data_type(element_type)
        vector_type = ir.VectorType(element, 2)
        source = _element_pointer(context, builder, array_type, arguments[0], index_type, arguments[1])
        nbytes = 2 * context.get_abi_sizeof(element)
        vector = builder.load(builder.bitcast(source, vector_type.as_pointer()), align=nbytes)
        lanes = [builder.extract_element(vector, ir.Constant(ir.IntType(32), lane)) for lane in range(2)]
        return context.make_tuple(builder, result, lanes)

    return result(array, index), generate


@intrinsic
def store_pair(typingctx, array, index, first, second):  # type: ignore[no-untyped-def]
    """``array[index], array[index + 1] = first, second`` in one access, aligned to two elements."""
    if not _require_array(array):
        return None
    element_type = array.dtype

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array_type, index_type = signature.args[:2]
        element = context.get_data_type(element_type)
        vector_type = ir.VectorType(element, 2)
        vector: Any = ir.Constant(vector_type, ir.Undefined)
        for lane in range(2):
            vector = builder.insert_element(vector, arguments[2 + lane], ir.Constant(ir.IntType(32), lane))
        target = _element_pointer(context, builder, array_type, arguments[0], index_type, arguments[1])
        nbytes = 2 * context.get_abi_sizeof(element)
        builder.store(vector, builder.bitcast(target, vector_type.as_pointer()), align=nbytes)
        return context.get_dummy_value()

    return types.void(array, index, element_type, element_type), generate


# --- int8 tensor cores of a warp --------------------------------------------------------------------------

copy_async_part = _instruction(
    "cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;",
    "r,l,r",
    (_U32, _U64, _I32),
    description="``copy_async_part(shared, address, nbytes)``: start copying the first ``nbytes`` (0 to 16) of the 16 "
    "at a global address to a shared address, both multiples of 16, zeros behind them; see ``commit_copies``.",
)


@intrinsic
def load_matrices(typingctx, registers, first, shared):  # type: ignore[no-untyped-def]
    """``ldmatrix.x4``: four matrices of 8 lines × 16 bytes from shared memory to ``registers[first...]``.

    ``shared`` is a shared address (uint32), a multiple of 16: lane 8 i + j gives that of line j of matrix i.
    ``registers`` are uint32; ``registers[first + i]`` becomes bytes 4 (lane mod 4) to + 3 of line lane / 4
    of matrix i.
    """
    if not _require_array(registers) or registers.dtype != types.uint32:
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        address = context.cast(builder, arguments[2], signature.args[2], types.uint32)
        function = ir.FunctionType(ir.LiteralStructType([word] * 4), [word])
        text = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
        assembly = ir.InlineAsm(function, text, "=r,=r,=r,=r,r,~{memory}", side_effect=True)
        loaded = builder.call(assembly, [address])
        target = _element_pointer(
            context, builder, signature.args[0], arguments[0], signature.args[1], arguments[1]
        )
        for i in range(4):
            builder.store(builder.extract_value(loaded, i), builder.gep(target, [ir.Constant(word, i)]))
        return context.get_dummy_value()

    return types.void(registers, first, shared), generate


def mma_bytes(kind_a: str, kind_b: str, tiles_m: int, tiles_n: int) -> Callable[..., Any]:
    """``multiply(sums, a, a0, b, b0)``: a warp adds a product of bytes, 32 deep, to its int32 ``sums``.

    ``tiles_m`` × ``tiles_n`` times ``mma.sync.m16n8k32``, whose operands are ``s8`` or ``u8``. With g = lane
    / 4 and t = lane % 4 (PTX ISA, the fragments of m16n8k32 for 8-bit integers), four bytes in a uint32:

    - ``a[a0 + 4 i + 2 s + h]`` is A at row 16 i + g + 8 h, columns 4 t + 16 s to + 3, for h, s < 2;
    - ``b[b0 + 2 j + s]`` is B at rows 4 t + 16 s to + 3, column 8 j + g;
    - ``sums[4 (tiles_n i + j) + 2 h + r]`` is C at row 16 i + g + 8 h, column 8 j + 2 t + r, for r < 2.

    Sums wrap modulo 2**32.
    """
    word = ir.IntType(32)
    text = (
        f"mma.sync.aligned.m16n8k32.row.col.s32.{kind_a}.{kind_b}.s32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$0, $1, $2, $3};"
    )
    function = ir.FunctionType(ir.LiteralStructType([word] * 4), [word] * 10)
    instruction = ir.InlineAsm(function, text, "=r,=r,=r,=r,r,r,r,r,r,r,0,1,2,3")

    @intrinsic
    def multiply(typingctx, sums, a, a0, b, b0):  # type: ignore[no-untyped-def]
        """Issue the products; see ``mma_bytes``."""
        if not _require_array(sums, a, b):
            return None

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            def registers(position: int, count: int) -> list[Any]:
                array, kind = arguments[position], signature.args[position]
                index, index_kind = arguments[position + 1], signature.args[position + 1]
                first = _element_pointer(context, builder, kind, array, index_kind, index)
                return [builder.gep(first, [ir.Constant(ir.IntType(64), i)]) for i in range(count)]

            left = [builder.load(place) for place in registers(1, 4 * tiles_m)]
            right = [builder.load(place) for place in registers(3, 2 * tiles_n)]
            data = context.make_array(signature.args[0])(context, builder, value=arguments[0]).data
            for tile in range(tiles_m * tiles_n):
                i, j = divmod(tile, tiles_n)
                places = [builder.gep(data, [ir.Constant(word, 4 * tile + x)]) for x in range(4)]
                operands = [*left[4 * i : 4 * i + 4], *right[2 * j : 2 * j + 2]]
                result = builder.call(instruction, [*operands, *(builder.load(place) for place in places)])
                for x, place in enumerate(places):
                    builder.store(builder.extract_value(result, x), place)
            return context.get_dummy_value()

        return types.void(sums, a, a0, b, b0), generate

    return multiply


# --- Hopper: warpgroup tensor cores -----------------------------------------------------------------------

_WGMMA_STEP_NBYTES = 32
"""Bytes of k that one ``wgmma`` eats, whatever the element type."""

wgmma_fence = _instruction(
    "wgmma.fence.sync.aligned;",
    "",
    (),
    description="Orders the registers' earlier accesses before the products that follow.",
)
wgmma_commit = _instruction(
    "wgmma.commit_group.sync.aligned;", "", (), description="The products issued so far become one group."
)


def wgmma_wait(pending: int) -> Callable[..., Any]:
    """Wait until at most ``pending`` groups of products are under way."""
    return _instruction(f"wgmma.wait_group.sync.aligned {pending};", "", ())


def shared_tile(address: int, leading_nbytes: int, stride_nbytes: int) -> int:
    """What a ``wgmma`` descriptor holds besides the address: 128-byte swizzle and two strides (PTX ISA
    9.7.15.5)."""
    return (1 << 62) | ((stride_nbytes >> 4) << 32) | ((leading_nbytes >> 4) << 16) | (address >> 4)


def wgmma(
    n: int,
    kind: str,
    steps: int,
    *,
    advance_a: int = 32,
    advance_b: int = 32,
    transpose_a: bool = False,
    transpose_b: bool = False,
) -> Callable[..., Any]:
    """``multiply(sums, a, b, keep)``: ``steps`` products ``m64n{n}`` of the calling warpgroup.

    ``kind`` is the PTX type string, such as ``s32.s8.s8`` or ``f32.bf16.bf16``. ``sums`` is a register array
    of n / 2 int32 or float32; ``a`` and ``b`` are descriptors of tiles in shared memory, moved by
    ``advance_a`` and ``advance_b`` bytes a step. ``keep`` = 0 starts from zero, else the products are added
    to ``sums``.
    """
    registers = n // 2
    itemsizes = {"s8": 1, "u8": 1, "bf16": 2, "f16": 2, "tf32": 4}
    k = _WGMMA_STEP_NBYTES // itemsizes[kind.split(".")[1]]
    integer = kind.startswith("s32")
    outputs = "{" + ", ".join(f"${i}" for i in range(registers)) + "}"
    a, b, keep = (f"${registers + i}" for i in range(3))
    modes = "" if integer else ", 1, 1"
    if kind.split(".")[1] in ("bf16", "f16"):
        modes += f", {int(transpose_a)}, {int(transpose_b)}"
    lines = ["{ .reg .pred p, always; .reg .b64 da, db;"]
    lines.append(f"setp.ne.b32 p, {keep}, 0; setp.eq.b32 always, 0, 0;")
    for step in range(steps):
        lines.append(f"add.s64 da, {a}, {step * advance_a >> 4}; add.s64 db, {b}, {step * advance_b >> 4};")
        scale = "p" if step == 0 else "always"
        lines.append(f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.{kind} {outputs}, da, db, {scale}{modes};")
    text = "\n".join([*lines, "}"])
    letter = "r" if integer else "f"
    constraints = ",".join(
        [f"={letter}"] * registers + ["l", "l", "r"] + [str(i) for i in range(registers)] + ["~{memory}"]
    )
    machine = ir.IntType(32) if integer else ir.FloatType()

    @intrinsic
    def multiply(typingctx, sums, a, b, keep):  # type: ignore[no-untyped-def]
        """Issue the products; see ``wgmma``."""
        if not _require_array(sums):
            return None

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, value=arguments[0]).data
            places = [builder.gep(data, [ir.Constant(ir.IntType(32), i)]) for i in range(registers)]
            values = [builder.load(place) for place in places]
            function = ir.FunctionType(
                ir.LiteralStructType([machine] * registers),
                [ir.IntType(64), ir.IntType(64), ir.IntType(32)] + [machine] * registers,
            )
            assembly = ir.InlineAsm(function, text, constraints, side_effect=True)
            results = builder.call(assembly, [*arguments[1:], *values])
            for i, place in enumerate(places):
                builder.store(builder.extract_value(results, i), place)
            return context.get_dummy_value()

        return types.void(sums, types.uint64, types.uint64, types.int32), generate

    return multiply


def wgmma_registers(n: int, steps: int) -> Callable[..., Any]:
    """``multiply(sums, fragments, b, keep)``: as ``wgmma`` of TF32, but A's 64 rows come from registers.

    ``fragments`` are 4 ``steps`` uint32 that hold float32 numbers; their low 13 bits are ignored. With g = lane / 4,
    t = lane % 4 and w the warp of the warpgroup, ``fragments[4 s + 2 x + h]`` is A at row 16 w + g + 8 h and column
    8 s + t + 4 x (PTX ISA, the register fragments of ``wgmma``). The products read them until they are waited for;
    nothing may be written to them before that.
    """
    registers, words = n // 2, 4 * steps
    instruction = f"wgmma.mma_async.sync.aligned.m64n{n}k{_WGMMA_STEP_NBYTES // 4}.f32.tf32.tf32"
    outputs = "{" + ", ".join(f"${i}" for i in range(registers)) + "}"
    b, keep = f"${registers + words}", f"${registers + words + 1}"
    lines = ["{ .reg .pred p, always; .reg .b64 db;"]
    lines.append(f"setp.ne.b32 p, {keep}, 0; setp.eq.b32 always, 0, 0;")
    for step in range(steps):
        a = "{" + ", ".join(f"${registers + 4 * step + i}" for i in range(4)) + "}"
        scale = "p" if step == 0 else "always"
        lines.append(f"add.s64 db, {b}, {step * _WGMMA_STEP_NBYTES >> 4};")
        lines.append(f"{instruction} {outputs}, {a}, db, {scale}, 1, 1;")
    text = "\n".join([*lines, "}"])
    constraints = ",".join(
        ["=f"] * registers + ["r"] * words + ["l", "r"] + [str(i) for i in range(registers)] + ["~{memory}"]
    )
    word, machine = ir.IntType(32), ir.FloatType()

    @intrinsic
    def multiply(typingctx, sums, fragments, b, keep):  # type: ignore[no-untyped-def]
        """Issue the products; see ``wgmma_registers``."""
        if not _require_array(sums, fragments) or fragments.dtype != types.uint32:
            return None

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            def places(position: int, count: int) -> list[Any]:
                array = context.make_array(signature.args[position])
                data = array(context, builder, value=arguments[position]).data
                return [builder.gep(data, [ir.Constant(word, i)]) for i in range(count)]

            totals = places(0, registers)
            values = [builder.load(place) for place in (*places(1, words), *totals)]
            function = ir.FunctionType(
                ir.LiteralStructType([machine] * registers),
                [word] * words + [ir.IntType(64), word] + [machine] * registers,
            )
            assembly = ir.InlineAsm(function, text, constraints, side_effect=True)
            results = builder.call(assembly, [*values[:words], *arguments[2:], *values[words:]])
            for i, place in enumerate(totals):
                builder.store(builder.extract_value(results, i), place)
            return context.get_dummy_value()

        return types.void(sums, fragments, types.uint64, types.int32), generate

    return multiply


# --- Counters in shared memory -----------------------------------------------------------------------------


def _pure(text: str, constraints: str, arguments: int) -> Callable[..., Any]:
    """An ``@intrinsic`` of uint32 scalars without side effects, which the compiler may move, merge or
    drop."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        function = ir.FunctionType(ir.IntType(32), [value.type for value in values])
        return builder.call(ir.InlineAsm(function, text, constraints, side_effect=False), values)

    def declare(typingctx, *given):  # type: ignore[no-untyped-def]
        return (_U32(*[_U32] * arguments), generate) if len(given) == arguments else None

    names = ["typingctx", *(f"argument_{i}" for i in range(arguments))]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    declare.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
    return intrinsic(declare)


multiply_add_low = _pure("mad.lo.u32 $0, $1, $2, $3;", "=r,r,r,r", 3)
"""``multiply_add_low(x, y, z)``: x y + z modulo 2**32. The compiler keeps it in one piece, where it would rather add
two products to each other first, and then to a sum."""


@intrinsic
def multiply_add_wide(typingctx, left, right, added):  # type: ignore[no-untyped-def]
    """``multiply_add_wide(x, y, z)``: x y + z modulo 2**64 for x and y of 32 bits, z of 64; in one piece as well."""
    # By halves with a carry, which the assembler makes one instruction of. Given one, it would add two products to
    # each other first, and then to a sum, with additions of 64 bits.
    text = (
        "{ .reg .u32 low, high; mov.b64 {low, high}, $3; mad.lo.cc.u32 low, $1, $2, low;"
        " madc.hi.u32 high, $1, $2, high; mov.b64 $0, {low, high}; }"
    )

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        function = ir.FunctionType(ir.IntType(64), [value.type for value in values])
        return builder.call(ir.InlineAsm(function, text, "=l,r,r,l", side_effect=False), values)

    return types.uint64(_U32, _U32, types.uint64), generate


byte_permute = _pure("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", 3)
"""``byte_permute(a, b, selector)``: four bytes of the eight of a (0-3) and b (4-7), chosen by four hex
digits."""

byte_rotate = _pure("prmt.b32.b4e $0, $1, $2, $3;", "=r,r,r,r", 3)
"""``byte_rotate(a, b, n)``: bytes n, n - 1, n - 2 and n - 3 of the eight of a (0-3) and b (4-7), counted round,
lowest first; only the lowest two bits of n count. ``byte_rotate(1, 0, n)`` is 1 << 8 n."""

signed_byte_dot = _pure("dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", 3)
"""``signed_byte_dot(a, b, c)``: c plus the sum of the products of the four signed bytes of a and of b, modulo 2^32."""

byte_dot = _pure("dp4a.u32.u32 $0, $1, $2, $3;", "=r,r,r,r", 3)
"""``byte_dot(a, b, c)``: c plus the products of the four bytes of a with those of b, all unsigned."""

funnel_right = _pure("shf.r.clamp.b32 $0, $1, $2, $3;", "=r,r,r,r", 3)
"""``funnel_right(low, high, shift)``: the low word of (high:low) >> shift, for shifts up to 32."""

shared_add = _instruction(
    "red.shared.add.u32 [$0], $1;",
    "r,r",
    (_U32, _U32),
    description="``shared_add(address, amount)``: an atomic addition that returns nothing, so no lane waits for it.",
)
shared_fetch_add = _instruction(
    "atom.shared.add.u32 $0, [$1], $2;",
    "=r,r,r",
    (_U32, _U32),
    _U32,
    description="``shared_fetch_add(address, amount)``: an atomic addition that returns the value before it.",
)
shared_fetch_and = _instruction(
    "atom.shared.and.b32 $0, [$1], $2;",
    "=r,r,r",
    (_U32, _U32),
    _U32,
    description="``shared_fetch_and(address, mask)``: an atomic bitwise and that returns the value before it.",
)
half_value = _instruction(
    "{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.f32.f16 $0, low; }",
    "=f,r",
    (_U32,),
    types.float32,
    description="The float32 equal to the float16 in the lower half of a word.",
)
