"""Low-precision copies of a state tile: from registers to a format.

In 8 bits every state row has a float32 scale, which takes the row's largest magnitude to the
largest number of the format. Products with a row are scaled, not its elements. A row with a value
that is not finite has the scale NaN: it reads as NaN, and no other row does.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, scf, vector

from pallas_kernels.layouts import broadcast

FORMATS = tuple(
    jnp.dtype(x) for x in (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8)
)

# The bits of infinity.
_INFINITE = {"bf16x2": 0x7F80, "f16x2": 0x7C00}
_TINY, _HUGE = (float(x) for x in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))


class ReadCopy(NamedTuple):
    """A copy of the checkpoint as Refs, written where the checkpoint is.

    Attributes:
      values: [B, H P, N] in one of `FORMATS`.
      scale: [B, H, P] float32, None in 16 bits.
    """

    values: Any
    scale: Any


def largest_magnitude(rows: jax.Array, *, interpret: bool) -> jax.Array:
    """Of each of the rows [n, N] float32; NaN where a row holds one."""
    if not interpret:
        return jnp.max(jnp.abs(rows), axis=1)
    # XLA's maximum of floats drops NaN on CPUs; bits order magnitudes as numbers do, NaN above.
    bits = jax.lax.bitcast_convert_type(rows, jnp.int32) & np.int32(0x7FFFFFFF)
    return jax.lax.bitcast_convert_type(jnp.max(bits, axis=1), jnp.float32)


def make_scale(amax: jax.Array, dtype: Any) -> jax.Array:
    """The scale of rows by their largest magnitude; NaN where that is not finite."""
    top = _top(dtype)
    # At least the smallest normal number: a row of zeros stays one. At most what takes `top` to a
    # finite number: the quotient may have been rounded up.
    most = float(np.nextafter(np.float32(_HUGE / top), np.float32(0)))
    scale = jnp.maximum(jnp.minimum(amax / top, most), _TINY)
    return jnp.where(amax <= _HUGE, scale, jnp.nan)


def encode(
    rows: jax.Array, scale: jax.Array | None, dtype: Any, layout: Any, *, interpret: bool
) -> jax.Array:
    """State rows in a format, to nearest even.

    In 16 bits finite values beyond the format's range become its largest number.

    Args:
      rows: [n, N] float32.
      scale: [n] from `make_scale`, None in 16 bits. Rows whose scale is NaN may be anything.
      dtype: one of `FORMATS`.
      layout: of the rows.
      interpret: for the interpreter on CPU.

    Returns:
      [n, N] in `dtype`.
    """
    if scale is None:
        return _within(rows, dtype) if interpret else _narrow(rows, dtype, layout)
    factor = broadcast(1 / scale, rows.shape, (0,), layout)
    if not jnp.issubdtype(dtype, jnp.integer):
        values = rows * factor
        if interpret:  # the device's conversion has this in it
            values = jnp.clip(values, -_top(dtype), _top(dtype))
        return values.astype(dtype)
    if interpret:
        return jnp.round(rows * factor).astype(dtype)
    return _round_to_integers(rows, factor, layout)


def _top(dtype: Any) -> float:
    """Largest number of a format."""
    integer = jnp.issubdtype(dtype, jnp.integer)
    info: Any = jnp.iinfo(dtype) if integer else jnp.finfo(dtype)
    return float(info.max)


def _within(rows: jax.Array, dtype: Any) -> jax.Array:
    """Rows in 16 bits, within the format's range but for infinities."""
    top = _top(dtype)
    return jnp.where(jnp.abs(rows) <= _HUGE, jnp.clip(rows, -top, top), rows).astype(dtype)


def _narrow(rows: jax.Array, dtype: Any, layout: Any) -> jax.Array:
    """The same; only a thread with a value that became infinite looks at each of its own."""
    out = plgpu.ShapeDtypeStruct(rows.shape, dtype, layout=layout)
    kind = "bf16x2" if dtype == jnp.bfloat16 else "f16x2"

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=out)
    def narrow(_: Any, x: fa.FragmentedArray) -> fa.FragmentedArray:
        i32, to = ir.IntegerType.get_signless(32), mgpu.utils.dtype_to_ir_type(dtype)

        def of(registers: list[ir.Value]) -> list[ir.Value]:
            """In the format, as words of two."""
            [length] = ir.VectorType(registers[0].type).shape
            narrowed = [arith.truncf(ir.VectorType.get((length,), to), one) for one in registers]
            words = [
                mgpu.utils.bitcast(one, ir.VectorType.get((length // 2,), i32)) for one in narrowed
            ]
            return [vector.extract(one, [], [n]) for one in words for n in range(length // 2)]

        def larger(x: ir.Value, y: ir.Value) -> ir.Value:
            return llvm.inline_asm(i32, [x, y], f"max.xorsign.abs.{kind} $0, $1, $2;", "=r,r,r")

        values = [*x.registers.flat]
        words = of(values)
        largest = functools.reduce(larger, words)
        infinite = mgpu.utils.c(_INFINITE[kind], i32)
        magnitude = arith.andi(largest, mgpu.utils.c(0x7FFF7FFF, i32))
        low = arith.andi(magnitude, mgpu.utils.c(0xFFFF, i32))
        high = arith.shrui(magnitude, mgpu.utils.c(16, i32))
        reached = arith.cmpi(arith.CmpIPredicate.uge, arith.maxui(low, high), infinite)
        branch = scf.IfOp(reached, [i32] * len(words), has_else=True)
        with ir.InsertionPoint(branch.then_block):
            scf.yield_(of([_clip(one, _top(dtype)) for one in values]))
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(words)
        [length] = ir.VectorType(values[0].type).shape
        registers = np.empty(x.registers.shape, dtype=object)
        results = [*branch.results]
        for n in range(registers.size):
            some = results[n * length // 2 : (n + 1) * length // 2]
            joined = vector.from_elements(ir.VectorType.get((length // 2,), i32), some)
            registers.flat[n] = mgpu.utils.bitcast(joined, ir.VectorType.get((length,), to))
        return fa.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    narrowed: jax.Array = narrow(rows)
    return narrowed


def _clip(values: ir.Value, top: float) -> ir.Value:
    """Finite ones within the range."""
    most, least, huge = (mgpu.utils.c(n, values.type) for n in (top, -top, _HUGE))
    within = arith.maximumf(arith.minimumf(values, most), least)
    is_finite = arith.cmpf(arith.CmpFPredicate.OLE, math.absf(values), huge)
    clipped: ir.Value = arith.select(is_finite, within, values)
    return clipped


def _round_to_integers(rows: jax.Array, factor: jax.Array, layout: Any) -> jax.Array:
    """rows * factor as int8: the low byte of a float whose last bit counts as one."""
    out = plgpu.ShapeDtypeStruct(rows.shape, jnp.dtype(jnp.int8), layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout, layout), return_type=out)
    def round_all(_: Any, x: fa.FragmentedArray, factor: fa.FragmentedArray) -> Any:
        registers = np.empty(x.registers.shape, dtype=object)
        for i, values in np.ndenumerate(x.registers):
            rounded = math.fma(values, factor.registers[i], mgpu.utils.c(1.5 * 2**23, values.type))
            [length] = ir.VectorType(values.type).shape
            i32, i8 = (ir.IntegerType.get_signless(n) for n in (32, 8))
            bits = mgpu.utils.bitcast(rounded, ir.VectorType.get((length,), i32))
            registers[i] = arith.trunci(ir.VectorType.get((length,), i8), bits)
        return fa.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=True)

    rounded: jax.Array = round_all(rows, factor)
    return rounded
