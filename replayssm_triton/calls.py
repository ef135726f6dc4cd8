"""One way to launch a Triton kernel on JAX arrays, whatever versions are installed.

jax-triton 0.3 and 0.4 name the output types differently. Under `TRITON_INTERPRET=1`, which must be
set before Triton is imported, kernels run in Triton's interpreter on the CPU instead.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

_NAMES = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "int32": "i32",
    "bool": "i1",
}


def interpreting() -> bool:
    """Whether Triton interprets kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0", "false", "off")


@functools.cache
def why_not() -> str | None:
    """Why no kernel can be launched with what is installed; None where one can."""
    for name in ("triton",) if interpreting() else ("triton", "jax_triton"):
        if importlib.util.find_spec(name) is None:
            return f"it needs triton and jax-triton, found no {name}: install replayssm_jax[triton]"
    if interpreting():
        return None
    try:
        import jax_triton.triton_lib as lib
    except ImportError as error:
        return f"jax-triton does not import: {error}"
    if _is_new() and not hasattr(lib.cb, "__file__"):
        # Its stand-in where the installed Triton is too old.
        versions = [importlib.metadata.version(name) for name in ("jax-triton", "triton")]
        return f"jax-triton {versions[0]} finds no NVIDIA backend in triton {versions[1]}"
    return None


def _is_new() -> bool:
    import jax_triton

    return tuple(jax_triton.__version_info__[:2]) >= (0, 4)


def launch(
    kernel: Any,
    inputs: Sequence[jax.Array],
    in_place: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    programs: int,
    num_warps: int,
    **constants: Any,
) -> tuple[jax.Array, ...]:
    """Run a kernel whose parameters are pointers, in this order, and then constants.

        inputs, in_place (as they came in, not to be used), outputs, in_place (as they go out)

    Both pointers to an array that is updated in place are equal where its buffer could be donated.

    Args:
      kernel: of `triton.jit`.
      inputs: arrays that are read.
      in_place: arrays that are read and written.
      outputs: shapes and dtypes of arrays that are written.
      programs: their number; `tl.program_id(0)` counts them.
      num_warps: warps of a program.
      constants: by name, values of `tl.constexpr` parameters.

    Returns:
      The outputs, then the updated arrays.
    """
    results = [*outputs, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in in_place)]
    if interpreting():
        run = functools.partial(
            _interpret, kernel, tuple(outputs), len(inputs), programs, constants
        )
        return tuple(jax.pure_callback(run, tuple(results), *inputs, *in_place))
    import jax_triton

    aliases = {len(inputs) + i: len(outputs) + i for i in range(len(in_place))}
    with warnings.catch_warnings():
        # 0.4 prefers Refs, which need other kernel parameters than 0.3 does.
        warnings.simplefilter("ignore", DeprecationWarning)
        found = jax_triton.triton_call(
            *inputs,
            *in_place,
            kernel=kernel,
            grid=(programs,),
            num_warps=num_warps,
            num_stages=1,
            input_output_aliases=aliases,
            **{"out_type" if _is_new() else "out_shape": results},
            **constants,
        )
    return tuple(found)


class _Memory:
    """A NumPy array as the interpreter wants a tensor."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self.dtype = _NAMES[array.dtype.name]

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> _Memory:
        return self

    def cpu(self) -> _Memory:
        return self

    def new_empty(self, *_: Any, **__: Any) -> _Memory:
        return _Memory(self.array)

    def set_(self, *_: Any) -> None:
        """The storage is the array that this was made for."""

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return self.array.strides

    def copy_(self, other: _Memory) -> None:
        """Memory is shared, nothing to copy back."""


def _interpret(
    kernel: Any,
    outputs: Sequence[jax.ShapeDtypeStruct],
    num_inputs: int,
    programs: int,
    constants: dict[str, Any],
    *arrays: Any,
) -> tuple[np.ndarray, ...]:
    inputs = [np.asarray(x) for x in arrays[:num_inputs]]
    updated = [np.array(x) for x in arrays[num_inputs:]]
    written = [np.full(x.shape, np.nan, x.dtype) for x in outputs]
    pointers = map(_Memory, (*inputs, *updated, *written, *updated))
    kernel[(programs,)](*pointers, **constants)
    return (*written, *updated)
