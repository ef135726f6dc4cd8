"""What tests of layers and of models share: random parameters, and arrays given as lists."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

# Compiling takes most of the time of these tests.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def filled(make, seed=0):
    """The module that `make` builds, with every parameter random, none 0 or 1 by initialisation.

    Embeddings stay as wide as they are drawn, so that logits are far from uniform.
    """
    graphdef, state = nnx.split(nnx.eval_shape(make))
    rng = np.random.default_rng(seed)

    def fill(path, leaf):
        name = next(key.key for key in reversed(path) if isinstance(getattr(key, "key", 0), str))
        noise = rng.normal(size=leaf.shape)
        if name in ("scale", "D"):
            noise = 1 + 0.1 * noise
        elif name == "A_log":
            noise = np.log(rng.uniform(1, 16, leaf.shape))
        elif name == "dt_bias":
            noise = noise - 3
        elif name != "embedding":
            noise = noise * leaf.shape[-2 if len(leaf.shape) > 1 else -1] ** -0.5
        return jnp.asarray(noise, leaf.dtype)

    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(fill, state))


def assert_takes_lists(call, operands, lists):
    """Lists, and NumPy's arrays that a trace closes over, are taken as JAX's arrays are."""
    expected = jax.eval_shape(call, *operands, **{k: jnp.asarray(x) for k, x in lists.items()})
    for given in (lists, {k: np.asarray(x) for k, x in lists.items()}):
        found = jax.eval_shape(functools.partial(call, **given), *operands)
        chex.assert_trees_all_equal_shapes_and_dtypes(found, expected)
