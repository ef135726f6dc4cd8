"""What the GPU's memory gives: bytes a second read, and read and written back, in bulk copies."""

from __future__ import annotations

import harness
import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

# A program streams tiles of 32 KB, of which it keeps two in flight, and two programs fit on a
# multiprocessor: as the kernels that are measured against it.
_TILE, _TILES, _STAGES = (64, 128), 8, 2
_BYTES = 2**31
# Sweeps in one timed run, so that starting and awaiting it does not count.
_SWEEPS = 16


def measure(write: bool = False) -> float:
    """Bytes a second, counting both directions; 0 where Mosaic GPU kernels cannot run."""
    if jax.default_backend() != "gpu" or jax.__version_info__ < (0, 11, 2):
        return 0.0
    x = jnp.ones((_BYTES // (4 * _TILE[1]), _TILE[1]), jnp.float32)

    @jax.jit
    def run(x: jax.Array) -> jax.Array:
        ref = jax.new_ref(x)
        done = jnp.zeros((), jnp.float32)
        return lax.fori_loop(0, _SWEEPS, lambda _, done: done + _sweep(ref, write)[0], done)

    timed = harness.time_in_turns({"sweep": harness.Contender(run, prepare=lambda: x)}, repeats=9)
    # Slow sweeps say something of the machine's other work, not of its memory.
    return _SWEEPS * x.nbytes * (2 if write else 1) / timed["sweep"].low * 1e6


def _sweep(ref: jax.Ref, write: bool) -> jax.Array:
    """Bring every tile to shared memory, and write it back; a number for each program."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    rows = _TILE[0] * _TILES

    def body(done: jax.Ref, tiles: jax.Ref, arrived: jax.Ref) -> None:
        program = lax.axis_index("program")
        here = [ref.at[pl.ds(program * rows + i * _TILE[0], _TILE[0])] for i in range(_TILES)]

        def bring(i: int) -> None:
            plgpu.copy_gmem_to_smem(here[i], tiles.at[i % _STAGES], arrived.at[i % _STAGES])

        for i in range(_STAGES):
            bring(i)
        for i in range(_TILES):
            if write and 0 < i <= _TILES - _STAGES:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                bring(i - 1 + _STAGES)
            plgpu.barrier_wait(arrived.at[i % _STAGES])
            if write:
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(tiles.at[i % _STAGES], here[i])
            elif i + _STAGES < _TILES:
                bring(i + _STAGES)
        if write:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        done[program] = jnp.float32(0)

    programs = ref.shape[0] // rows
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((programs,), jnp.float32),
        scratch_types=(
            plgpu.SMEM((_STAGES, *_TILE), jnp.float32),
            plgpu.Barrier(num_barriers=_STAGES),
        ),
        grid=(programs,),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )()
