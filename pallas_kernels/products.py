"""Products with fp32 accuracy on tensor cores that multiply bf16.

float32 values are taken apart into bf16 terms, and the terms multiplied in pairs, all but those
below fp32 rounding.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, vector

from pallas_kernels.layouts import as_argument, tiled
from pallas_kernels.tf32 import READS

# Of `plgpu.mma`, warp-level bf16 products that every GPU since Ampere has:
# [64 m, 8 n] accumulator = [64 m, 16 k] times [16 k, 8 n].
_MMA = mgpu.MMALayouts(jnp.bfloat16)
ACC, LHS, RHS = as_argument(_MMA.acc), as_argument(_MMA.lhs), as_argument(_MMA.rhs)
# The same operands with more neighbours of the contracted dimension in a lane than two: eight in
# 16 bits, which lanes read in vectors of 16 bytes, and sixteen in 8 bits.
_WIDE_LHS = {
    2: tiled(((64, 32), (16, 32), (8, 32), (8,)), (-7,), (-3, -2)),
    1: tiled(((64, 64), (16, 64), (8, 64), (16,)), (-7,), (-3, -2)),
}


def _columns(tiles: Any, lane_dims: Any, vector_dim: int = -2) -> dict[int, Any]:
    """Layouts of operands [k, 8 n], or [k, n] whose one or two columns are eight by repetition.

    `tiles` and `lane_dims` are of the first, the first of these dimensions is the columns'.
    """
    found = {8: tiled(tiles, (fa.Replicated(4),), lane_dims, vector_dim)}
    for n in (1, 2):
        of_n = tuple((k, min(columns, n)) for k, columns in tiles)
        lanes = (fa.Replicated(8 // n), *lane_dims[n == 1 :])
        found[n] = tiled(of_n, (fa.Replicated(4),), lanes, vector_dim)
    return found


_RHS = _columns(((16, 8), (8, 8), (2, 1)), (-3, -4))
_WIDE_RHS = _columns(((32, 8), (8, 1)), (-3, -4))
_WIDEST_RHS = _columns(((64, 8), (16, 1), (8, 1)), (-5, -6))
# [16 m, k] operand and [16 m, 8 n] sum that every warp has for itself.
_ROWS = tiled(((16, 32), (8, 32), (8,), (4,)), (fa.Replicated(4),), (-4, -3))
_NARROW_ROWS = tiled(((16, 16), (16, 8), (8, 8), (2,)), (fa.Replicated(4),), (-3, -2))
# [16 k, 64 m] whose elements lie as those of its transpose in an operand.
RECORDS = tiled(((8, 64), (8, 16), (8, 8), (2, 1)), (-7,), (-3, -4))
SUMS = tiled(((16, 8), (8, 8), (2,)), (fa.Replicated(4),), (-3, -2))
# [2, 16] sums, four of each row in a warp, in as many lanes.
PAIR = tiled(((2, 16), (2, 4), (1, 1)), (-5,), (fa.Replicated(4), -4, -3))


def term_pairs(key_terms: int, state_terms: int = 3) -> list[tuple[int, int]]:
    """Products of bf16 terms (of fp32 values, of keys) that an fp32-accurate product needs.

    In the order of the first; the others are below fp32 rounding.
    """
    return [(a, b) for a in range(state_terms) for b in range(min(key_terms, 3 - a))]


def split(x: jax.Array, count: int, *, cut: bool = False, away: bool = False) -> list[jax.Array]:
    """bf16 terms whose sum is `x`, as far as it goes; each is of what those before it leave.

    Where `cut` all but the last are cut off, not rounded: that takes one instruction an element, a
    rounding to bf16 whose result is also used as float32 a slow one. What `term_pairs` leaves out
    is then twice as large and of one sign, unless the other factor is rounded: so one of two is.
    Halves may be rounded `away` from zero, not to even: that takes two instructions.
    """
    found = []
    for _ in range(count - 1):
        if cut or away:
            bits = lax.bitcast_convert_type(x, jnp.uint32)
            if away:
                bits = bits + jnp.uint32(0x8000)
            top = lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
            found.append(top.astype(jnp.bfloat16))
        else:
            found.append(x.astype(jnp.bfloat16))
            top = found[-1].astype(jnp.float32)
        x = x - top
    return [*found, x.astype(jnp.bfloat16)]


def tile_terms(x: jax.Array, count: int, layout: Any, *, interpret: bool) -> list[list[jax.Array]]:
    """`split` of a tile of a read copy, each term as parts that add up to it.

    Values in bf16 or 8 bits are their only term. In a layout of `operand_layouts` they stay; where
    lanes hold sixteen neighbours, each four of them come in the order 0, 2, 1, 3.
    """
    wide = layout == _WIDE_LHS[1] and not interpret
    if x.dtype == jnp.int8 and wide:
        return [_integer_parts(x)]
    assert not wide or x.dtype != jnp.bfloat16
    if x.dtype in (jnp.bfloat16, jnp.int8):
        return [[x.astype(jnp.bfloat16)]]
    floats = x.astype(jnp.float32)
    return [[term] for term in split(_reorder(floats) if wide else floats, count, cut=True)]


def _integer_parts(x: jax.Array) -> list[jax.Array]:
    """int8 as two bf16 arrays that add up to it: 128 and its low bits, and minus 128 or 256.

    Both come out of the bits by masks alone, every other element of four at a time, and tensor
    cores add what they are multiplied by. The bound of the sums in float32 grows fourfold with it,
    and columns near the end of their range, 1e36, may give NaN where the sum were finite.
    """
    layout = _WIDE_LHS[1]
    out = plgpu.ShapeDtypeStruct(x.shape, jnp.dtype(jnp.bfloat16), layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=(out, out))
    def parts(_: Any, x: fa.FragmentedArray) -> tuple[fa.FragmentedArray, ...]:
        i32 = ir.IntegerType.get_signless(32)

        def constant(n: int) -> Any:
            return mgpu.utils.c(n, i32)

        # A mask and what is added to it are one instruction if one of them is in a register: so
        # this is not a constant to the assembler, though no number of a multiprocessor changes it.
        low_top = llvm.inline_asm(
            i32,
            [],
            "{ .reg .b32 n; mov.u32 n, %smid; shr.u32 n, n, 31; or.b32 $0, n, 0x43004300; }",
            "=r",
        )
        high_top = arith.xori(low_top, constant(-0x7FFF8000))
        found = []
        for mask, top in ((0x007F007F, low_top), (0x00800080, high_top)):
            registers = np.empty(x.registers.shape, dtype=object)
            for i, register in np.ndenumerate(x.registers):
                words = mgpu.utils.bitcast(register, ir.VectorType.get((4,), i32))
                pairs = []
                for n in range(4):
                    word = vector.extract(words, [], [n])
                    for shift in (0, 8):
                        bits = arith.shrui(word, constant(shift)) if shift else word
                        bits = arith.ori(arith.andi(bits, constant(mask)), top)
                        pairs.append(
                            mgpu.utils.bitcast(bits, ir.VectorType.get((2,), ir.BF16Type.get()))
                        )
                registers[i] = mgpu.utils.vector_concat(pairs)
            found.append(
                fa.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)
            )
        return tuple(found)

    return list(parts(x))


def _reorder(x: jax.Array) -> jax.Array:
    """Each four neighbours that a lane holds of an operand in the order 0, 2, 1, 3."""
    layout = _WIDE_LHS[1]
    out = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=out)
    def reorder(_: Any, x: fa.FragmentedArray) -> fa.FragmentedArray:
        registers = np.empty(x.registers.shape, dtype=object)
        order = [n + m for n in range(0, 16, 4) for m in (0, 2, 1, 3)]
        for i, register in np.ndenumerate(x.registers):
            registers[i] = vector.shuffle(register, register, order)
        return fa.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    reordered: jax.Array = reorder(x)
    return reordered


def operand_layouts(contracted: int, itemsize: int = 2, columns: int = 8) -> tuple[Any, Any]:
    """Layouts of the operands [m, k], in memory of this itemsize, and [k, n] of `multiply`.

    Wherever k allows it a lane holds 16 bytes and more that lie together. One or two `columns` are
    repeated to eight.
    """
    if contracted % 32:
        return plain_layouts(columns)
    if itemsize == 1 and contracted % 64 == 0:
        return _WIDE_LHS[1], _WIDEST_RHS[columns]
    return _WIDE_LHS[2], _WIDE_RHS[columns]


def plain_layouts(columns: int = 8) -> tuple[Any, Any]:
    """The same as `plgpu.mma` wants them."""
    return LHS, _RHS[columns]


def operand_width(contracted: int) -> int:
    """Width of rows in shared memory of a bf16 [n, k] operand whose reads hit all banks."""
    if contracted % 32:
        return contracted + 8
    return contracted + (32 - contracted) % 64


def rows_layout(contracted: int) -> Any:
    """Layout of the operand [16, k] of `multiply_rows`."""
    return _ROWS if contracted % 32 == 0 else _NARROW_ROWS


def multiply(
    acc: jax.Array, lhs: jax.Array, rhs: jax.Array, layouts: tuple[Any, Any], *, interpret: bool
) -> jax.Array:
    """acc [m, n] + lhs [m, k] @ rhs [k, n], bf16 operands in layouts of `operand_layouts`.

    Fewer columns of `rhs` are repeated to n.
    """
    count, n = rhs.shape[1], acc.shape[1]
    if interpret:  # it has no warp-level products
        if count < n:
            rhs = jnp.tile(rhs, n // count)
        return acc + lhs.astype(jnp.float32) @ rhs.astype(jnp.float32)
    if layouts[0] != LHS:
        lhs = _relabel(lhs, layouts[0], LHS)
    if layouts[1] != RHS:
        rhs = _relabel(rhs, layouts[1], RHS, (rhs.shape[0], n))
    return plgpu.mma(acc, lhs, rhs)


def column_of(sums: jax.Array, c: int, *, interpret: bool) -> jax.Array:
    """Column c, [m], of sums [m, 8] with the same one or two columns all over, in `ACC`."""
    if interpret:
        return sums[:, c]
    layout = ACC.reduce(1)
    out = plgpu.ShapeDtypeStruct(sums.shape[:1], sums.dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(ACC,), return_type=out)
    def pick(_: Any, x: fa.FragmentedArray) -> fa.FragmentedArray:
        registers = np.empty(layout.to_mgpu().registers_shape(sums.shape[:1]), dtype=object)
        registers.flat = [*_pick(x.registers, (c % 2,)).flat]
        return fa.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=None)

    column: jax.Array = pick(sums)
    return column


def sum_terms(sums: jax.Array) -> jax.Array:
    """[m, 2] sums over three terms from [m, 8] in `ACC`: both columns of each term, then any two.

    A lane has both columns of a term, and of two rows. It gives away one of each pair that it has
    and adds to the other, so that it ends with one sum.
    """
    layout = tiled(((64, 2), (16, 2), (8, 1)), (-6,), (-2, -4, -3))
    out = plgpu.ShapeDtypeStruct((sums.shape[0], 2), sums.dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(ACC,), return_type=out)
    def add(_: Any, x: fa.FragmentedArray) -> fa.FragmentedArray:
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        third = arith.andi(mgpu.utils.thread_idx(), mgpu.utils.c(3, i32))
        is_none = arith.cmpi(arith.CmpIPredicate.eq, third, mgpu.utils.c(3, i32))
        zero = mgpu.utils.c(0.0, f32)
        pairs = []
        for register in x.registers.flat:
            both = [vector.extract(register, [], [n]) for n in range(2)]
            pairs.append([arith.select(is_none, zero, one) for one in both])
        found = [_halve(*pair, 1) for pair in pairs]
        found = [_halve(*found[n : n + 2], 2) for n in range(0, len(found), 2)]
        given = layout.to_mgpu()
        registers = np.empty(given.registers_shape((sums.shape[0], 2)), dtype=object)
        registers.flat = [vector.from_elements(ir.VectorType.get((1,), f32), [n]) for n in found]
        return fa.FragmentedArray(_registers=registers, _layout=given, _is_signed=None)

    total: jax.Array = add(sums)
    return total


def dot_pairs(pairs: list[tuple[jax.Array, jax.Array]], layout: Any, *, interpret: bool) -> Any:
    """Products of two pairs of arrays [16, N] in `system_rows`, row by row, [2, 16] in `PAIR`.

    Lanes give away half of their sums at a time, as in `sum_terms`, until each has one.
    """
    if interpret:
        return jnp.stack([jnp.sum(x * y, axis=1) for x, y in pairs])
    out = plgpu.ShapeDtypeStruct((2, 16), jnp.dtype(jnp.float32), layout=PAIR)
    idle = pairs[0][0].shape[1] % 32 != 0  # lanes 16 apart have the same

    @plgpu.inline_mgpu(arg_types=(layout,) * 4, return_type=out)
    def add(_: Any, *arrays: fa.FragmentedArray) -> fa.FragmentedArray:
        def rows(x: fa.FragmentedArray) -> list[list[Any]]:
            """What a lane has of each of its rows."""
            length = ir.VectorType(x.registers.flat[0].type).shape[0]
            return [
                [vector.extract(one, [], [n]) for one in row for n in range(length)]
                for row in x.registers.reshape(-1, 4).T
            ]

        found = []
        for x, y in zip(arrays[::2], arrays[1::2], strict=True):
            for left, right in zip(rows(x), rows(y), strict=True):
                total = arith.mulf(left[0], right[0])
                for a, b in zip(left[1:], right[1:], strict=True):
                    total = math.fma(a, b, total)
                found.append(total)
        for bit in (1, 2, 4):
            found = [_halve(*found[n : n + 2], bit) for n in range(0, len(found), 2)]
        for bit in (8,) if idle else (8, 16):
            found = [arith.addf(x, mgpu.utils.shfl_bfly(x, bit)) for x in found]
        registers = np.empty(PAIR.to_mgpu().registers_shape((2, 16)), dtype=object)
        kind = ir.VectorType.get((1,), ir.F32Type.get())
        registers.flat = [vector.from_elements(kind, [x]) for x in found]
        return fa.FragmentedArray(_registers=registers, _layout=PAIR.to_mgpu(), _is_signed=None)

    return add(*itertools.chain(*pairs))


def _halve(one: Any, other: Any, bit: int) -> Any:
    """The sum over two lanes of one value, or of the other in lanes that have this bit."""
    i32 = ir.IntegerType.get_signless(32)
    found = arith.andi(mgpu.utils.thread_idx(), mgpu.utils.c(bit, i32))
    has_bit = arith.cmpi(arith.CmpIPredicate.ne, found, mgpu.utils.c(0, i32))
    given, kept = arith.select(has_bit, one, other), arith.select(has_bit, other, one)
    return arith.addf(kept, mgpu.utils.shfl_bfly(given, bit))


def multiply_rows(lhs: jax.Array, rhs: jax.Array, *, interpret: bool) -> jax.Array:
    """lhs [16, k] @ rhs [k, n], float32 in `SUMS`, each warp for itself.

    Operands bf16, in `rows_layout(k)` and as in `operand_layouts(k, 2)`.
    """
    if interpret:
        return lhs.astype(jnp.float32) @ rhs.astype(jnp.float32)
    shape = 64, lhs.shape[1]
    if lhs.shape[1] % 32 == 0:
        lhs, rhs = _relabel(lhs, _ROWS, LHS, shape), _relabel(rhs, _WIDE_RHS[8], RHS)
    else:
        lhs = _relabel(lhs, _NARROW_ROWS, LHS, shape)
    acc = plgpu.layout_cast(jnp.zeros((64, rhs.shape[1]), jnp.float32), ACC)
    return _relabel(plgpu.mma(acc, lhs, rhs), ACC, SUMS, (16, rhs.shape[1]))


def transpose(x: jax.Array) -> jax.Array:
    """[8 n, 64] in `RECORDS` as [64, 8 n] in `ACC`.

    That is as well how Hopper's products take an operand from registers.
    """
    shape = 64, x.shape[0]
    out = plgpu.ShapeDtypeStruct(shape, x.dtype, layout=ACC)

    @plgpu.inline_mgpu(arg_types=(RECORDS,), return_type=out)
    def pair(_: Any, x: fa.FragmentedArray) -> fa.FragmentedArray:
        registers = np.empty(ACC.to_mgpu().registers_shape(shape), dtype=object)
        for i, two in enumerate(x.registers.reshape(-1, 2)):
            registers.flat[i] = mgpu.utils.vector_concat([*two])
        return fa.FragmentedArray(
            _registers=registers, _layout=ACC.to_mgpu(), _is_signed=x.is_signed
        )

    paired: jax.Array = pair(x)
    return paired


def as_operand(sums: jax.Array) -> jax.Array:
    """[64 m, 16] in `ACC` as an operand in `LHS`: a lane has the same elements of both."""
    return _relabel(sums, ACC, LHS)


def as_left(x: jax.Array, *, interpret: bool) -> jax.Array:
    """[64, 16] bf16 in `READS` as an operand in `LHS`, whose lanes hold neighbours along a row.

    Warps turn eight rows of eight columns at a time.
    """
    if interpret:
        return x
    out = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=LHS)

    @plgpu.inline_mgpu(arg_types=(READS,), return_type=out)
    def emit(_: Any, x: fa.FragmentedArray) -> fa.FragmentedArray:
        i32 = ir.IntegerType.get_signless(32)
        kind = ir.VectorType.get((2,), ir.BF16Type.get())
        given = LHS.to_mgpu()
        registers = np.empty(given.registers_shape(x.shape), dtype=object)
        for i, pair in enumerate(x.registers.reshape(-1, 2)):
            both = mgpu.utils.bitcast(mgpu.utils.vector_concat([*pair]), i32)
            turned = llvm.inline_asm(
                i32, [both], "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r"
            )
            registers.flat[i] = mgpu.utils.bitcast(turned, kind)
        return fa.FragmentedArray(_registers=registers, _layout=given, _is_signed=None)

    operand: jax.Array = emit(x)
    return operand


def _relabel(
    x: jax.Array, layout: Any, new: Any, shape: tuple[int, ...] | None = None
) -> jax.Array:
    """Take what the threads hold of an array in `layout` for another one in layout `new`.

    Of operands whose lanes hold more neighbours of the contracted dimension than `plgpu.mma` wants,
    that changes the order of this dimension: lane l of four holds positions 8 l to 8 l + 7 of 32.
    The first four of them are taken for those that mma has it hold in its first 16 positions (two
    neighbours in each half), the others for those in the next 16; so with 16 l to 16 l + 15 of 64,
    but for the order of each four, 0, 2, 1, 3 there. A sum may run in any order, the same for both
    operands. Sixteen rows that every warp has are taken for the rows of each of them, and one or
    two columns that lanes have repeatedly for eight.
    """
    shape = x.shape if shape is None else shape
    registers_shape = new.to_mgpu().registers_shape(shape)
    out = plgpu.ShapeDtypeStruct(shape, x.dtype, layout=new)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=out)
    def relabel(_: Any, x: fa.FragmentedArray) -> fa.FragmentedArray:
        registers: Any = x.registers
        parts: Any
        wide = layout in (_WIDE_LHS[1], *_WIDEST_RHS.values())
        width = 64 if wide else 32
        pairs = [(i, i + 1) for i in range(0, layout.to_mgpu().vector_length, 2)]
        if layout in (*_WIDE_RHS.values(), *_WIDEST_RHS.values()):  # by (k, n, of the lane's)
            if wide:  # in the order of `tile_terms`
                pairs = [(i, i + 2) for n in (0, 4) for i in (n, n + 1)]
            parts = registers.reshape(shape[0] // width, shape[1] // 8, -1)
            registers = np.stack([_pick(parts, pair) for pair in pairs], axis=-1)
            registers = registers.reshape(*parts.shape[:2], width // 16, 2).transpose(0, 2, 1, 3)
        elif new == LHS and layout not in (_NARROW_ROWS, ACC):
            # By (m, k, half of the rows, part of the lane's).
            parts = registers.reshape(shape[0] // 64, shape[1] // width, 2, -1)
            registers = np.stack([_pick(parts, pair) for pair in pairs], axis=-1)
            registers = registers.reshape(*parts.shape[:3], width // 16, 2)
            registers = registers.transpose(0, 1, 3, 4, 2)
        return fa.FragmentedArray(
            _registers=registers.reshape(registers_shape),
            _layout=new.to_mgpu(),
            _is_signed=x.is_signed,
        )

    return relabel(x)


def _pick(registers: np.ndarray, elements: tuple[int, ...]) -> np.ndarray:
    """These elements of every register."""
    picked = np.empty(registers.shape, dtype=object)
    for index, register in np.ndenumerate(registers):
        picked[index] = vector.shuffle(register, register, elements)
    return picked
