"""Products with fp32 accuracy on tensor cores that multiply bf16.

float32 values are taken apart into bf16 terms, and the terms multiplied in pairs, all but those
below fp32 rounding.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

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
_WIDE_RHS = tiled(((32, 8), (8, 1)), (fa.Replicated(4),), (-3, -4), vector_dim=-2)
_WIDEST_RHS = tiled(((64, 8), (16, 1), (8, 1)), (fa.Replicated(4),), (-5, -6), vector_dim=-2)
# [16 m, k] operand and [16 m, 8 n] sum that every warp has for itself.
_ROWS = tiled(((16, 32), (8, 32), (8,), (4,)), (fa.Replicated(4),), (-4, -3))
_NARROW_ROWS = tiled(((16, 16), (16, 8), (8, 8), (2,)), (fa.Replicated(4),), (-3, -2))
# [16 k, 64 m] whose elements lie as those of its transpose in an operand.
RECORDS = tiled(((8, 64), (8, 16), (8, 8), (2, 1)), (-7,), (-3, -4))
SUMS = tiled(((16, 8), (8, 8), (2,)), (fa.Replicated(4),), (-3, -2))


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


def tile_terms(x: jax.Array, count: int) -> list[jax.Array]:
    """`split` of a tile of a read copy; values in bf16 or 8 bits are their only term."""
    if x.dtype in (jnp.bfloat16, jnp.int8):
        return [x.astype(jnp.bfloat16)]
    return split(x.astype(jnp.float32), count, cut=True)


def operand_layouts(contracted: int, itemsize: int = 2) -> tuple[Any, Any]:
    """Layouts of the operands [m, k], in memory of this itemsize, and [k, n] of `multiply`.

    Wherever k allows it a lane holds 16 bytes and more that lie together.
    """
    if contracted % 32:
        return LHS, RHS
    if itemsize == 1:
        return (_WIDE_LHS[1], _WIDEST_RHS) if contracted % 64 == 0 else (_WIDE_LHS[2], _WIDE_RHS)
    return _WIDE_LHS[2], _WIDE_RHS


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
    """acc [m, n] + lhs [m, k] @ rhs [k, n], bf16 operands in layouts of `operand_layouts`."""
    if interpret:  # it has no warp-level products
        return acc + lhs.astype(jnp.float32) @ rhs.astype(jnp.float32)
    if layouts != (LHS, RHS):
        lhs, rhs = _relabel(lhs, layouts[0], LHS), _relabel(rhs, layouts[1], RHS)
    return plgpu.mma(acc, lhs, rhs)


def multiply_rows(lhs: jax.Array, rhs: jax.Array, *, interpret: bool) -> jax.Array:
    """lhs [16, k] @ rhs [k, n], float32 in `SUMS`, each warp for itself.

    Operands bf16, in `rows_layout(k)` and as in `operand_layouts(k, 2)`.
    """
    if interpret:
        return lhs.astype(jnp.float32) @ rhs.astype(jnp.float32)
    shape = 64, lhs.shape[1]
    if lhs.shape[1] % 32 == 0:
        lhs, rhs = _relabel(lhs, _ROWS, LHS, shape), _relabel(rhs, _WIDE_RHS, RHS)
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
    neighbours in each half), the others for those in the next 16; so with 16 l to 16 l + 15 of 64.
    A sum may run in any order, the same for both operands. Sixteen rows that every warp has are
    taken for the rows of each of them.
    """
    shape = x.shape if shape is None else shape
    registers_shape = new.to_mgpu().registers_shape(shape)
    out = plgpu.ShapeDtypeStruct(shape, x.dtype, layout=new)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=out)
    def relabel(_: Any, x: fa.FragmentedArray) -> fa.FragmentedArray:
        registers: Any = x.registers
        parts: Any
        wide = layout in (_WIDE_LHS[1], _WIDEST_RHS)
        width = 64 if wide else 32
        pairs = range(0, layout.to_mgpu().vector_length, 2)
        if layout in (_WIDE_RHS, _WIDEST_RHS):  # by (k, n, of the lane's)
            parts = registers.reshape(shape[0] // width, shape[1] // 8, -1)
            registers = np.stack([_cut(parts, i, i + 2) for i in pairs], axis=-1)
            registers = registers.reshape(*parts.shape[:2], width // 16, 2).transpose(0, 2, 1, 3)
        elif new == RHS:  # of four, by (k, half of the lane's)
            parts = registers.reshape(shape[0] // 32, 1, 2)
            registers = np.stack([_cut(parts, i, i + 2) for i in pairs], axis=-1)
            registers = registers.transpose(0, 2, 1, 3)
        elif new == LHS and layout not in (_NARROW_ROWS, ACC):
            # By (m, k, half of the rows, part of the lane's).
            parts = registers.reshape(shape[0] // 64, shape[1] // width, 2, -1)
            registers = np.stack([_cut(parts, i, i + 2) for i in pairs], axis=-1)
            registers = registers.reshape(*parts.shape[:3], width // 16, 2)
            registers = registers.transpose(0, 1, 3, 4, 2)
        return fa.FragmentedArray(
            _registers=registers.reshape(registers_shape),
            _layout=new.to_mgpu(),
            _is_signed=x.is_signed,
        )

    return relabel(x)


def _cut(registers: np.ndarray, start: int, stop: int) -> np.ndarray:
    cut = np.empty(registers.shape, dtype=object)
    for index, register in np.ndenumerate(registers):
        cut[index] = mgpu.utils.vector_slice(register, slice(start, stop))
    return cut
