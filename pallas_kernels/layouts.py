"""How arrays of these kernels lie over the 128 threads of a warpgroup, and in shared memory."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm


def tiled(tiles: Any, warp_dims: Any, lane_dims: Any, vector_dim: int = -1) -> Any:
    """Layout from its tiles, and which of their dimensions are warps, lanes and vectors."""
    layout = fa.TiledLayout(
        fa.Tiling(tiles), warp_dims, lane_dims, vector_dim, _check_canonical=False
    )
    return as_argument(layout.canonicalize())


def as_argument(layout: fa.TiledLayout) -> Any:
    """The layout as Pallas takes it."""
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def state_rows(key_dim: int) -> Any:
    """[16 r, N] state rows: lanes read 16 bytes each, and a row sum stays in a warp."""
    width = 32 if key_dim % 32 == 0 else 16
    lanes = width // 4
    return tiled(((64, width), (16, width), (32 // lanes, width), (4,)), (-7,), (-3, -2))


def record_rows(key_dim: int) -> Any:
    """[16, N] records: eight lanes for each of 16 rows."""
    vector = 4 if key_dim % 32 == 0 else 2
    return tiled(((16, 8 * vector), (4, 8 * vector), (vector,)), (-5,), (-3, -2))


def system_rows(key_dim: int) -> Any:
    """[16, N] records: every lane of a warp has some of each of its four rows."""
    width, vector, idle = _over_a_warp(key_dim)
    return tiled(((16, width), (4, width), (1, width), (vector,)), (-7,), (*idle, -2))


def token_rows(key_dim: int) -> Any:
    """[4 t, N] rows of tokens: a row lies in one warp."""
    width, vector, idle = _over_a_warp(key_dim)
    return tiled(((4, width), (1, width), (vector,)), (-5,), (*idle, -2))


def _over_a_warp(key_dim: int) -> tuple[int, int, tuple[Any, ...]]:
    """Of a row: elements of a whole warp and of a lane, and lanes that have what others have."""
    lanes = 32 if key_dim % 32 == 0 else 16
    vector = next(v for v in (4, 2, 1) if key_dim % (lanes * v) == 0)
    return lanes * vector, vector, (fa.Replicated(2),) if lanes == 16 else ()


def operand_rows() -> Any:
    """[16, 16 n] operands of a tensor-core product; fits their 32-byte swizzle."""
    return tiled(((16, 16), (4, 16), (2,)), (-5,), (-3, -2))


def spread(*shape: int, vector: int = 4) -> Any:
    """[n] or [r, n] over all threads as evenly as it goes; what does not divide is replicated."""
    rows, columns = shape if len(shape) == 2 else (1, *shape)
    powers = (1, 2, 4, 8, 16, 32)
    best = None
    widths = (1, 2, 4, 8)
    for v, lc, lr, wc, wr in itertools.product(widths, powers, powers, (1, 2, 4), (1, 2, 4)):
        if v > vector or lc * lr > 32 or wc * wr > 4 or columns % (v * lc * wc) or rows % (lr * wr):
            continue
        candidate = (lc * lr * wc * wr, v, lc, lr, wc, wr)
        best = max(best, candidate) if best else candidate
    assert best is not None
    _, v, lc, lr, wc, wr = best
    warps: list[Any] = [d for d, n in ((-5, wr), (-4, wc)) if n > 1]
    lanes: list[Any] = [d for d, n in ((-3, lr), (-2, lc)) if n > 1]
    if wr * wc < 4:
        warps.insert(0, fa.Replicated(4 // (wr * wc)))
    if lr * lc < 32:
        lanes.insert(0, fa.Replicated(32 // (lr * lc)))
    if len(shape) == 2:
        tiles: Any = ((wr * lr, wc * lc * v), (lr, lc * v), (v,))
    else:
        tiles = ((wc * lc * v,), (lc * v,), (v,))
        warps = [-3 if d == -4 else d for d in warps]
    return tiled(tiles, tuple(warps), tuple(lanes))


def swizzled(dtype: Any, width: int, swizzle: int | None = None) -> Any:
    """Transforms of a shared-memory tile whose rows are `width` wide."""
    itemsize = jnp.dtype(dtype).itemsize
    if swizzle is None:
        swizzle = next((s for s in (128, 64, 32) if width * itemsize % s == 0), None)
    if swizzle is None:  # 8-bit rows of 48 bytes lie as they are
        return ()
    tiling: Any = plgpu.TilingTransform
    swizzling: Any = plgpu.SwizzleTransform
    return tiling((8, swizzle // itemsize)), swizzling(swizzle)


def load(ref: Any, layout: Any, *, optimized: bool = False) -> jax.Array:
    """Load from shared or global memory into a layout; `optimized` avoids bank conflicts."""
    return plgpu.load(ref, layout=layout, optimized=optimized)


def store(ref: Any, value: jax.Array, *, optimized: bool = False) -> None:
    """Store to shared or global memory; `optimized` avoids bank conflicts."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=optimized)
    else:  # jax 0.11 has this as the indexed assignment, and decides by itself
        ref[...] = value


def meet(*, interpret: bool) -> None:
    """Wait for all threads; then they see what each has stored to shared memory.

    Bulk copies and warpgroup-level products see it after `plgpu.commit_smem` alone, whose fence
    takes longer.
    """
    if interpret:
        plgpu.commit_smem()
        return

    @plgpu.inline_mgpu()
    def barrier(_: Any) -> None:
        void = ir.Type.parse("!llvm.void")  # barrier 0 is of whole blocks, 1 of their warpgroup
        llvm.inline_asm(void, [], "bar.sync 1, 128;", "~{memory}", has_side_effects=True)

    barrier()


def decay(log: jax.Array, layout: Any, *, interpret: bool) -> jax.Array:
    """exp of what is at most zero in two instructions, to 1e-7 of one."""
    if interpret:
        return jnp.exp(log)
    out = plgpu.ShapeDtypeStruct(log.shape, jnp.dtype(jnp.float32), layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=out)
    def exp(_: Any, x: Any) -> Any:
        return x.exp(approx=True)

    result: jax.Array = exp(log)
    return result


def is_replicated(n: int) -> bool:
    """Whether `spread(n)` has several threads hold an element.

    Then updating shared memory in place takes a barrier between the loads and the stores.
    """
    return n % 128 != 0


def broadcast(
    x: jax.Array, shape: tuple[int, ...], dims: tuple[int, ...], layout: Any
) -> jax.Array:
    """`lax.broadcast_in_dim` into a layout."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, dims), layout)


def beside(parts: list[jax.Array], layout: Any, *, interpret: bool, axis: int = 1) -> jax.Array:
    """Join parts of an array along an axis, all in its layout."""
    if interpret or len(parts) == 1:
        return jnp.concatenate(parts, axis=axis)
    shape = list(parts[0].shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    out = plgpu.ShapeDtypeStruct(tuple(shape), parts[0].dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,) * len(parts), return_type=out)
    def join(_: Any, *parts: fa.FragmentedArray) -> fa.FragmentedArray:
        registers = np.concatenate([part.registers for part in parts], axis=axis)
        return fa.FragmentedArray(
            _registers=registers, _layout=layout.to_mgpu(), _is_signed=parts[0].is_signed
        )

    joined: jax.Array = join(*parts)
    return joined


def zeros(shape: tuple[int, ...], layout: Any) -> jax.Array:
    """float32 zeros in a layout."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
