"""Which implementation runs an operation: the meaning of `implementation=`.

A name that cannot run raises with the reason; None picks the best that supports the case and falls
back to "xla" without a word.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, Literal

import jax

from replayssm_jax.spec import ReplaySpec

Implementation = Literal["xla", "mosaic_gpu", "mosaic_gpu_interpret", "triton"]

NAMES = ("xla", "mosaic_gpu", "triton")

# Kernels update arrays in place through Refs, which older versions cannot do under jit.
OLDEST_JAX_FOR_KERNELS = (0, 11, 2)

# The first with bf16 arithmetic and what else the Triton kernels are compiled to.
OLDEST_CAPABILITY_FOR_TRITON = 8.0

# By parts of their device kinds.
_HOPPER = ("H100", "H200", "H800", "H20")
_BLACKWELL = ("B100", "B200", "B300")

_interpreting = contextvars.ContextVar("interpreting", default=False)


@contextlib.contextmanager
def interpreted_kernels() -> Iterator[None]:
    """Within it, implementation="mosaic_gpu" runs in the Mosaic GPU interpreter on the CPU.

    For tests: it checks values and addresses, thousands of times slower than a GPU.
    """
    import jax.experimental.pallas.mosaic_gpu as plgpu

    token = _interpreting.set(True)
    try:
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
            yield
    finally:
        _interpreting.reset(token)


def resolve(
    implementation: str | None,
    spec: ReplaySpec,
    num_tokens: int,
    *,
    arrays: Any = (),
    tree: bool = False,
) -> Implementation:
    """The implementation to run: the named one, or for None the best that supports the case.

    Args:
      implementation: None or one of `NAMES`.
      spec: the layer.
      num_tokens: T of the step; 0 for a flush.
      arrays: a pytree of what the operation works on; where it lies on a mesh, no kernel runs.
      tree: whether the tokens are a tree, which no kernel takes.

    Raises:
      ValueError: an unknown name, or a named implementation that cannot run, with the reason.
    """
    if implementation == "xla":
        return "xla"
    if implementation not in (None, *NAMES):
        raise ValueError(f"implementation must be None or one of {NAMES}, found {implementation!r}")
    reason = "its kernels take chains of drafts only, found parents" if tree else None
    if reason is None and implementation != "triton":
        reason = _why_not_mosaic(spec, num_tokens, arrays)
        if reason is None:
            return "mosaic_gpu_interpret" if _interpreting.get() else "mosaic_gpu"
        if implementation is None:
            reason = _why_not_triton(spec, num_tokens, arrays, by_name=False)
    elif reason is None:
        reason = _why_not_triton(spec, num_tokens, arrays, by_name=True)
    if reason is None:
        return "triton"
    if implementation is None:
        return "xla"
    raise ValueError(f'implementation={implementation!r} cannot run: {reason}; pass "xla" or None')


def _why_no_kernels(arrays: Any) -> str | None:
    """Why no kernel of any kind runs."""
    if jax.__version_info__ < OLDEST_JAX_FOR_KERNELS:
        oldest = ".".join(map(str, OLDEST_JAX_FOR_KERNELS))
        return f"it needs jax {oldest} or newer, found {jax.__version__}"
    meshes = {jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays)}
    if any(
        size > 1 and kind != jax.sharding.AxisType.Manual
        for mesh in (jax.sharding.get_abstract_mesh(), *meshes)
        for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    ):
        return "arrays on a mesh would be gathered: call it inside jax.shard_map"
    return None


def _why_not_mosaic(spec: ReplaySpec, num_tokens: int, arrays: Any) -> str | None:
    from replayssm_jax import kernels

    if reason := _why_no_kernels(arrays):
        return reason
    if not _interpreting.get():
        kind = _target()
        if kind is None:
            return f"it needs an NVIDIA GPU, found platform {_default_device().platform!r}"
        if not any(name in kind for name in (*_HOPPER, *_BLACKWELL)):
            return f"it needs a Hopper or Blackwell GPU, found {kind!r}"
    return kernels.why_not("mosaic_gpu", spec, num_tokens)


def _why_not_triton(spec: ReplaySpec, num_tokens: int, arrays: Any, by_name: bool) -> str | None:
    """Why the Triton kernels do not run; in Triton's interpreter they do by name alone."""
    from replayssm_jax import kernels
    from replayssm_triton import calls

    if reason := _why_no_kernels(arrays):
        return reason
    if calls.interpreting():
        if not by_name:
            return "it is interpreted on the CPU"
    else:
        kind, device = _target(), _gpu_at_hand()
        if kind is None:
            return f"it needs an NVIDIA GPU, found platform {_default_device().platform!r}"
        if device is None or device.device_kind != kind:
            return f"it compiles for the GPU at hand alone, and {kind!r} is none"
        if float(device.compute_capability) < OLDEST_CAPABILITY_FOR_TRITON:
            return (
                f"it needs compute capability {OLDEST_CAPABILITY_FOR_TRITON} or newer, "
                f"found {device.compute_capability} ({kind!r})"
            )
    return calls.why_not() or kernels.why_not("triton", spec, num_tokens)


def target_is_hopper() -> bool:
    """Whether what is compiled for is a Hopper GPU."""
    kind = _target() or ""
    return any(name in kind for name in _HOPPER)


def _target() -> str | None:
    """Device kind of the GPU that is compiled for, None where it is no NVIDIA GPU."""
    abstract: Any = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        return abstract.device_kind if abstract.platform == "gpu" else None
    device = _gpu_at_hand()
    if device is None or not device.compute_capability[:1].isdigit():  # "gfx942" is AMD's
        return None
    kind: str = device.device_kind
    return kind


def _gpu_at_hand() -> Any:
    device = _default_device()
    return device if device.platform == "gpu" else None


def _default_device() -> Any:
    """Where arrays go that are on no device yet: `jax.default_device` may say the CPU."""
    chosen = jax.config.jax_default_device
    if chosen is None or isinstance(chosen, str):  # the name of a platform
        return jax.devices(chosen)[0]
    return chosen
