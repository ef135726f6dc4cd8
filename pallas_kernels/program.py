"""What every kernel here has in common: a program's share of the heads, and its addresses."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layouts import broadcast, load, spread, store
from pallas_kernels.problem import TILE, Config, Problem, programs_per_row

F32 = jnp.float32


class Program:
    """Which heads and state rows one program has, and where they lie."""

    def __init__(self, problem: Problem, config: Config, state: Any):
        p, c = problem, config
        self.p, self.c, self.state = p, c, state

        # lax.div throughout: `//` also looks at signs, which takes long to lower.
        index = lax.axis_index("program")
        per_row = programs_per_row(p, c)
        self.b = lax.div(index, per_row)
        # The first of this program's state rows, among the H P of the batch row.
        self.first_row = lax.rem(index, per_row) * c.num_rows
        self.head = lax.div(self.first_row, p.value_dim)
        self.group = lax.div(self.head, p.heads_per_group)
        self.row_in_head = lax.rem(self.first_row, p.value_dim)
        # Of the programs that share a key head, or a head, one appends what they share.
        self.leads_head = self.row_in_head == 0
        self.leads_group = self.leads_head & (lax.rem(self.head, p.heads_per_group) == 0)

        self.shape = (c.heads, c.rows) if c.heads > 1 else (c.rows,)
        # What several tokens read lies row by row, so that a thread's rows are not neighbours.
        self.layout = spread(*self.shape, vector=1 if p.num_tokens > 1 else 4)
        self.channels = spread(p.key_dim)

    # Addresses

    def rows_of(self, ref: Any, *lead: Any) -> Any:
        """This program's rows of an array [..., H, P], as [..., *shape]."""
        if self.c.heads == 1:
            return ref.at[(*lead, self.head, pl.ds(self.row_in_head, self.c.rows))]
        return ref.at[(*lead, pl.ds(self.head, self.c.heads))]

    def tile(self, i: Any) -> Any:
        """State tile i of this program in device memory."""
        return self.state.at[self.b, pl.ds(self.first_row + i * TILE, TILE)]

    @property
    def other_heads(self) -> range:
        """Heads that a tile may have rows of, counted from its first one, without it."""
        rows = self.c.rows
        return range(1, 1 + (0 if rows % TILE == 0 else (TILE - 1) // rows + (TILE % rows != 0)))

    def tile_rows(self, ref: Any, *lead: Any, i: Any) -> Any:
        """The rows of tile i of a shared array [*lead, *shape, ...], as [TILE, ...]."""
        if len(self.shape) == 1:
            return ref.at[(*lead, pl.ds(i * TILE, TILE))]
        if self.c.rows % TILE == 0:
            per_head = self.c.rows // TILE
            return ref.at[(*lead, lax.div(i, per_head), pl.ds(lax.rem(i, per_head) * TILE, TILE))]
        rest = ref.shape[len(lead) + 2 :]
        flat = ref.reshape(*ref.shape[: len(lead)], self.c.num_rows, *rest)
        return flat.at[(*lead, pl.ds(i * TILE, TILE))]

    # Values for each head: scalars where a program has one head, else vectors over the rows' layout

    def load_gate(self, ref: Any, *lead: Any) -> jax.Array:
        """This program's heads of an array [..., H] in device memory."""
        if self.c.heads == 1:
            return ref[(*lead, self.head)]
        return load(ref.at[(*lead, pl.ds(self.head, self.c.heads))], self.layout.reduce(1))

    def store_gate(self, value: jax.Array, ref: Any, *lead: Any) -> None:
        """Counterpart of `load_gate`."""
        if self.c.heads == 1:
            ref[(*lead, self.head)] = value
        else:
            store(ref.at[(*lead, pl.ds(self.head, self.c.heads))], value)

    def load_heads(self, ref: Any, *index: Any) -> jax.Array:
        """ref[index] of a shared array [..., heads]."""
        if self.c.heads == 1:
            return ref[(*index, 0)]
        return load(ref.at[index] if index else ref, self.layout.reduce(1))

    def store_heads(self, value: jax.Array, ref: Any, *index: Any) -> None:
        """Counterpart of `load_heads`."""
        if self.c.heads == 1:
            ref[(*index, 0)] = value
        else:
            store(ref.at[index] if index else ref, value)

    def constant(self, value: float) -> Any:
        """A value for each head that is the same for all."""
        if self.c.heads == 1:
            return jnp.float32(value)
        return plgpu.layout_cast(jnp.full((self.c.heads,), value, F32), self.layout.reduce(1))

    def over_rows(self, value: jax.Array) -> jax.Array:
        """A value for each head as one for each of its rows."""
        if self.c.heads == 1:
            return value
        return broadcast(value, self.shape, (0,), self.layout)
