"""Products of float32 values, to 1e-6 of each, on tensor cores that multiply TF32.

A value is two terms, the second of which is what the first leaves: fewer instructions than three
terms in bf16. Tensor cores take the upper 19 bits of each: of the 13 bits that the second may have
they lose up to two, and the product of two second terms is left out.

A warp-level product has [16, 8] operands from the left and [8, 8] from the right. Lane l of four
has k = l and l + 4 of the eight; here it gives two neighbours instead, in both operands, since a
sum may run in any order.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.layouts import tiled, zeros
from pallas_kernels.problem import TILE

# [64 n, 8 m] products with tiles: a lane has two rows, neighbours, of one column.
READS = tiled(((64, 8), (16, 8), (8, 8), (2, 1)), (-8,), (-3, -4))
# [8 m, 64 n] whose elements lie as those of their transpose in `READS`.
TURNED = tiled(((8, 64), (8, 16), (8, 8), (1, 2)), (-7,), (-4, -3))


def width(contracted: int) -> int:
    """Elements along k of which four lanes hold neighbours: eight each, or four."""
    return 32 if contracted % 32 == 0 else 16


class TileProducts:
    """Products [64, 8 c] of a state tile [64, k] with columns [8 c, k], some of k at a time.

    The tile is the right operand, as neighbours along k are a lane's there. The left one has two
    terms of eight columns, or sixteen columns that are exact in TF32.

    Args:
      contracted: all of k.
      columns: 8 c.
      dtype: of the columns, float32 or bf16, which is exact.
      interpret: for the interpreter on CPU.
    """

    def __init__(self, contracted: int, columns: int, dtype: Any, *, interpret: bool):
        self.exact, self.interpret = dtype == jnp.bfloat16, interpret
        w = width(contracted)
        lane = w // 4
        every = fa.Replicated(4)
        if lane > 4:
            self.rows = tiled(((64, w), (16, w), (8, w), (lane,), (4,)), (-8,), (-4, -3))
        else:
            self.rows = tiled(((64, w), (16, w), (8, w), (4,)), (-7,), (-3, -2))
        if lane > 4 and not self.exact:  # a lane reads 16 bytes at once
            self.columns = tiled(((8, w), (lane,), (4,)), (every,), (-4, -3))
        else:
            self.columns = tiled(((8, w), (lane,)), (every,), (-3, -2))
        count = columns // 8
        # What both halves of each left operand have: (which eight columns, which of their terms).
        self.halves: list[Any] = [
            (c, term)
            for first in range(0, count, 2)
            for term in range(1 if self.exact else 2)
            for c in range(first, min(first + 2, count))
        ]
        self.halves += [None] * (len(self.halves) % 2)
        # Sums of their own for each term of the tile: a product waits for the one before of a sum.
        width_of_sums = columns if interpret else 8 * len(self.halves)
        self.sums = [zeros((TILE, width_of_sums), READS)] * 2
        self.num_columns = columns

    def add(self, rows: jax.Array, columns: jax.Array) -> None:
        """Add the products for some of k, in the layouts `rows` and `columns`."""
        columns = columns.astype(jnp.float32)
        column_terms = [columns] if self.exact else _terms(columns, away=True)
        for i, term in enumerate(_terms(rows)):
            if self.interpret:
                for other in column_terms[: len(column_terms) - i or 1]:
                    self.sums[i] = self.sums[i] + _cut(term) @ _cut(other).T
            else:
                self.sums[i] = self.multiply(i, term, column_terms)

    def multiply(self, term: int, rows: jax.Array, columns: list[jax.Array]) -> jax.Array:
        """The sums of one term of the tile with its products."""
        sums = self.sums[term]
        types = (READS, self.rows, *[self.columns] * len(columns))
        out = plgpu.ShapeDtypeStruct(sums.shape, sums.dtype, layout=READS)

        @plgpu.inline_mgpu(arg_types=types, return_type=out)
        def emit(_: Any, sums: Any, rows: Any, *columns: Any) -> fa.FragmentedArray:
            acc = _elements(sums).reshape(-1, 2, 2, 2)  # [left, half, eight rows, of the lane's]
            right = _lanes(rows, 2)
            left = [_lanes(x, self.num_columns // 8) for x in columns]
            nothing = llvm.mlir_undef(ir.F32Type.get())  # sums that are not kept
            for i in range(0, right.shape[1], 2):
                pair = (i, i + 1)
                for n, halves in enumerate(zip(self.halves[::2], self.halves[1::2], strict=True)):
                    if term and all(x is not None and x[1] for x in halves):
                        continue  # at most 2^-21 of the product
                    values = [
                        nothing if x is None else left[x[1]][x[0], j] for j in pair for x in halves
                    ]
                    for eight in range(2):
                        found = _product(acc[n, :, eight].flat, values, right[eight, i : i + 2])
                        acc[n, :, eight] = found.reshape(2, 2)
            return _like(sums, acc)

        found: jax.Array = emit(sums, rows, *columns)
        return found

    def total(self) -> jax.Array:
        """The sums, in `READS`."""
        total = self.sums[1] + self.sums[0]
        if self.interpret:
            return total
        out = plgpu.ShapeDtypeStruct((TILE, self.num_columns), total.dtype, layout=READS)

        add = np.vectorize(lambda a, b: arith.addf(a, b), otypes=[object])

        @plgpu.inline_mgpu(arg_types=(READS,), return_type=out)
        def join(_: Any, x: fa.FragmentedArray) -> fa.FragmentedArray:
            found: dict[int, Any] = {}
            for half, registers in reversed(
                [*zip(self.halves, x.registers.reshape(len(self.halves), -1), strict=True)]
            ):
                if half is not None:
                    c = half[0]
                    found[c] = add(found[c], registers) if c in found else registers
            registers = np.stack([found[c] for c in range(self.num_columns // 8)])
            shape = READS.to_mgpu().registers_shape((TILE, self.num_columns))
            return fa.FragmentedArray(
                _registers=registers.reshape(shape), _layout=x.layout, _is_signed=None
            )

        joined: jax.Array = join(total)
        return joined


class Shares:
    """Sums [16 r, 8 c] of products along k, shared out among r c = 4 warps."""

    def __init__(self, row_warps: int, column_warps: int, *, interpret: bool):
        r, c = row_warps, column_warps

        def warps(*dims: int | None) -> tuple[Any, ...]:
            counts = zip(dims, (r, c), strict=True)
            return tuple(fa.Replicated(n) if d is None else d for d, n in counts if n > 1)

        self.shape, self.interpret = (16 * r, 8 * c), interpret
        self.rows = tiled(((16 * r, 32), (16, 32), (8, 32), (8,), (4,)), warps(-8, None), (-4, -3))
        self.columns = tiled(((8 * c, 32), (8, 32), (8,), (4,)), warps(None, -6), (-4, -3))
        self.layout = tiled(((16 * r, 8 * c), (16, 8), (8, 8), (2,)), warps(-7, -6), (-3, -2))
        # Pairs of terms, each with two sums of its own, as in `TileProducts`.
        pairs = ((0, 0), (0, 1), (1, 0))
        self.sums = [dict.fromkeys(pairs, zeros(self.shape, self.layout)) for _ in range(2)]

    def add(self, rows: jax.Array, columns: jax.Array) -> None:
        """Add rows [16 r, 32] @ columns [8 c, 32]^T, float32 in the layouts of the same name."""
        row_terms, column_terms = _terms(rows), _terms(columns, away=True)
        for a, b in self.sums[0]:
            self.sums[0][a, b] = self.multiply(self.sums[0][a, b], row_terms[a], column_terms[b])
        self.sums.reverse()

    def multiply(self, acc: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
        """acc + rows @ columns^T of what TF32 has of both."""
        if self.interpret:
            return acc + _cut(rows) @ _cut(columns).T
        out = plgpu.ShapeDtypeStruct(acc.shape, acc.dtype, layout=self.layout)

        @plgpu.inline_mgpu(arg_types=(self.layout, self.rows, self.columns), return_type=out)
        def emit(_: Any, acc: Any, rows: Any, columns: Any) -> fa.FragmentedArray:
            left, right, sums = _lanes(rows, 2), _lanes(columns, 1), _elements(acc)
            for i in range(0, left.shape[1], 2):
                sums = _product(sums, left[:, i : i + 2].T.flat, right[0, i : i + 2])
            return _like(acc, sums)

        found: jax.Array = emit(acc, rows, columns)
        return found

    def total(self) -> jax.Array:
        """The sums, in `layout`."""
        found = [sums[pair] for pair in self.sums[0] for sums in self.sums]
        return functools.reduce(lambda x, y: x + y, reversed(found))


def turn(x: jax.Array, *, interpret: bool) -> jax.Array:
    """[8 m, 64] in `TURNED` as [64, 8 m] in `READS`."""
    if interpret:
        return x.T
    out = plgpu.ShapeDtypeStruct(x.shape[::-1], x.dtype, layout=READS)

    @plgpu.inline_mgpu(arg_types=(TURNED,), return_type=out)
    def emit(_: Any, x: fa.FragmentedArray) -> fa.FragmentedArray:
        layout = READS.to_mgpu()
        kind = ir.VectorType.get((1,), ir.VectorType(x.registers.flat[0].type).element_type)
        registers = np.empty(layout.registers_shape(x.shape[::-1]), dtype=object)
        registers.flat = [vector.from_elements(kind, [one]) for one in _elements(x)]
        return fa.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    turned: jax.Array = emit(x)
    return turned


def _cut(x: jax.Array) -> jax.Array:
    """What TF32 has of float32."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(bits & jnp.uint32(0xFFFFE000), jnp.float32)


def _terms(x: jax.Array, *, away: bool = False) -> list[jax.Array]:
    """Two terms whose sum is `x`; the first is cut off, or halves are rounded `away` from zero.

    The cut takes no instruction, as tensor cores read no other bits. If a sum leaves out products
    of two second terms, one of them must be of either sign.
    """
    top = x
    if away:
        bits = lax.bitcast_convert_type(x, jnp.uint32) + jnp.uint32(0x1000)
        top = lax.bitcast_convert_type(bits, jnp.float32)
    top = _cut(top)
    return [top, x - top]


def _product(sums: Any, left: Any, right: Any) -> np.ndarray:
    """One warp-level product: what a lane has of the sums (4), the left and right (2) operand."""
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
    given = [mgpu.utils.bitcast(x, i32) for x in (*left, *right)]
    found = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * 4),
        [*given, *sums],
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4),
        has_side_effects=False,
    )
    return np.array([llvm.extractvalue(f32, found, [i]) for i in range(4)], dtype=object)


def _elements(x: fa.FragmentedArray) -> np.ndarray:
    """What a lane has of an array, in order."""
    found = []
    for register in x.registers.flat:
        for i in range(ir.VectorType(register.type).shape[0]):
            place = ir.DenseI64ArrayAttr.get([i])
            found.append(vector.extract(register, dynamic_position=[], static_position=place))
    return np.array(found, dtype=object)


def _lanes(x: fa.FragmentedArray, eights: int) -> np.ndarray:
    """What a lane has of as many times eight rows, as [eights, elements along k]."""
    return _elements(x).reshape(eights, -1)


def _like(x: fa.FragmentedArray, elements: np.ndarray) -> fa.FragmentedArray:
    """An array as `x` of a lane's elements."""
    kind = ir.VectorType(x.registers.flat[0].type)
    registers = np.empty(x.registers.shape, dtype=object)
    for i, values in enumerate(elements.reshape(-1, kind.shape[0])):
        registers.flat[i] = vector.from_elements(kind, list(values))
    return fa.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=x.is_signed)
