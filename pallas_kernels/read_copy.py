"""Low-precision copies of a state tile: from registers to a format, and back to float32.

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
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxlib.mlir.dialects import vector as vector_dialect

from pallas_kernels.layouts import broadcast, copy_rows, load
from pallas_kernels.program import F32

FORMATS = tuple(
    jnp.dtype(x) for x in (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8)
)

_TINY, _HUGE = (float(x) for x in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))


class ReadCopy(NamedTuple):
    """A copy of the checkpoint as Refs, written where the checkpoint is.

    Attributes:
      values: [B, H P, N] in one of `FORMATS`.
      scale: [B, H, P] float32, None in 16 bits.
    """

    values: Any
    scale: Any


def is_scaled(dtype: Any) -> bool:
    """Whether a copy of this dtype has scales."""
    return jnp.dtype(dtype).itemsize == 1


def encode(tile: jax.Array, dtype: Any, layout: Any) -> tuple[jax.Array, jax.Array | None]:
    """State rows in a format, to nearest even, and the scale of each row, None in 16 bits.

    Finite values beyond the format's range become its largest number.

    Args:
      tile: [n, N] float32.
      dtype: one of `FORMATS`.
      layout: of the tile.

    Returns:
      [n, N] in `dtype`, and [n] float32 in `layout.reduce(1)`.
    """
    integer = jnp.issubdtype(dtype, jnp.integer)
    info: Any = jnp.iinfo(dtype) if integer else jnp.finfo(dtype)
    top = float(info.max)
    if not is_scaled(dtype):
        within = jnp.maximum(jnp.minimum(tile, top), -top)
        return jnp.where(jnp.abs(tile) <= _HUGE, within, tile).astype(dtype), None
    amax = jnp.max(jnp.abs(tile), axis=1)
    finite = amax <= _HUGE
    # At least the smallest normal number: a row of zeros stays one. At most what takes `top` to a
    # finite number: the quotient may have been rounded up.
    most = float(np.nextafter(np.float32(_HUGE / top), np.float32(0)))
    scale = jnp.maximum(jnp.minimum(amax / top, most), _TINY)
    values = tile * broadcast(1 / scale, tile.shape, (0,), layout)
    values = jnp.maximum(jnp.minimum(values, top), -top)
    if integer:
        values = jnp.round(values)
    return values.astype(dtype), jnp.where(finite, scale, jnp.nan)


def load_tile(ref: Any, dtype: Any, key_dim: int, interpret: bool) -> jax.Array:
    """A tile [TILE, N] of a copy in shared memory as float32, in the second of `copy_rows`.

    Lanes read 16 bytes each, which are more elements than a register vector of float32 has: the
    vectors are cut into those of four.
    """
    wide, narrow = copy_rows(key_dim, jnp.dtype(dtype).itemsize)
    tile = load(ref, wide)
    if interpret:
        return tile.astype(F32)
    return _widen(tile, wide, narrow)


def _widen(tile: jax.Array, wide: Any, narrow: Any) -> jax.Array:
    @plgpu.inline_mgpu(
        arg_types=(wide,),
        return_type=plgpu.ShapeDtypeStruct(tile.shape, jnp.dtype(F32), layout=narrow),
    )
    def widen(_: Any, x: Any) -> Any:
        x = _from_int8(x) if tile.dtype == jnp.int8 else x.astype(utils.dtype_to_ir_type(F32))
        layout = narrow.to_mgpu()
        registers = np.empty(layout.registers_shape(tile.shape), dtype=object)
        for i in range(registers.size):
            vector, part = divmod(i, registers.size // x.registers.size)
            cut = slice(part * layout.vector_length, (part + 1) * layout.vector_length)
            registers.flat[i] = utils.vector_slice(x.registers.flat[vector], cut)
        return fa.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    widened: jax.Array = widen(tile)
    return widened


def _from_int8(x: Any) -> Any:
    """int8 registers as float32, exactly, without the conversion that GPUs have few units for.

    A byte under the exponent of 2**23 is the float 2**23 + byte; sign bits are flipped before.
    """
    i32 = ir.IntegerType.get_signless(32)
    word, offset = functools.partial(utils.c, ty=i32), utils.c(2.0**23 + 128, ir.F32Type.get())

    def convert(vector: Any) -> Any:
        floats = []
        for first in range(0, x.layout.vector_length, 4):
            four = utils.bitcast(utils.vector_slice(vector, slice(first, first + 4)), i32)
            four = arith.xori(four, word(-0x7F7F7F80))
            for byte in range(4):
                bits = utils.prmt(word(0x4B000000), four, word(0x3104 + byte))
                floats.append(arith.subf(arith.bitcast(ir.F32Type.get(), bits), offset))
        one = ir.VectorType.get((1,), ir.F32Type.get())
        return utils.vector_concat([vector_dialect.broadcast(one, value) for value in floats])

    registers = np.empty_like(x.registers)
    for i, vector in np.ndenumerate(x.registers):
        registers[i] = convert(vector)
    return fa.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)
