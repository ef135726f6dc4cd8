"""Equivalence tests with chex, to copy into your own project.

    python examples/chex_equivalence.py                # or with -k kda, for one family
    python -m pytest examples/chex_equivalence.py

Replay decoding must equal the conventional recurrence, in outputs and in state, with and without
`jit`; it must trace once; and rolling back a draft must leave what never having drafted leaves.
Replace `make_case` with the shapes and inputs of your own layer.
"""

from __future__ import annotations

import functools
import sys
import unittest
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from absl.testing import parameterized

import replayssm_jax as rs

BATCH, TOKENS, WINDOW = 3, 21, 8  # two windows and a part of the third
each_family = parameterized.named_parameters(
    ("mamba2", "mamba2"), ("gated_delta_net", "gated_delta_net"), ("kda", "kda")
)


class Case(NamedTuple):
    spec: rs.ReplaySpec
    inputs: rs.TokenInputs  # TOKENS tokens of BATCH rows, as numpy: slices of it compile nothing
    outputs: jax.Array  # what conventional decoding makes of them
    recurrent: jax.Array  # and the state it ends in


@functools.cache
def make_case(family: str) -> Case:
    """A small layer of the family, and random raw activations as a layer would give them."""
    heads, key_heads, key_dim, value_dim = 4, 2, 16, 8
    options: dict[str, Any] = {
        "window": WINDOW,
        "max_tokens": 4,
        "key_dtype": jnp.float32,
        "value_dtype": jnp.float32,
    }
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), (BATCH, TOKENS, *shape))

    A_log = jnp.linspace(-2.0, 1.0, heads)
    if family == "mamba2":
        spec = rs.ReplaySpec.mamba2(
            num_heads=heads,
            head_dim=value_dim,
            state_dim=key_dim,
            num_groups=key_heads,
            **options,
        )
        inputs = rs.TokenInputs.mamba2(
            x=normal(heads, value_dim),
            dt=normal(heads),
            B=normal(key_heads, key_dim),
            C=normal(key_heads, key_dim),
            A_log=A_log,
        )
    elif family == "gated_delta_net":
        spec = rs.ReplaySpec.gated_delta_net(
            num_value_heads=heads,
            num_key_heads=key_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            **options,
        )
        inputs = rs.TokenInputs.gated_delta_net(
            q=normal(key_heads, key_dim),
            k=normal(key_heads, key_dim),
            v=normal(heads, value_dim),
            a=normal(heads),
            b=normal(heads),
            A_log=A_log,
        )
    else:
        spec = rs.ReplaySpec.kda(num_heads=heads, key_dim=key_dim, value_dim=value_dim, **options)
        inputs = rs.TokenInputs.kda(
            q=normal(heads, key_dim),
            k=normal(heads, key_dim),
            v=normal(heads, value_dim),
            a=normal(heads, key_dim),
            b=normal(heads),
            A_log=A_log,
        )
    outputs, recurrent = rs.recurrent_scan(spec, jnp.zeros(spec.state_shape(BATCH)), inputs)
    return Case(spec, jax.device_get(inputs), outputs, recurrent)


def tokens(inputs: rs.TokenInputs, start: int, stop: int) -> rs.TokenInputs:
    return jax.tree.map(lambda x: x[:, start:stop], inputs)


def assert_equivalent(found: Any, wanted: Any) -> None:
    """Equal in structure, shapes and dtypes, and in values to float32 rounding."""
    chex.assert_trees_all_equal_shapes_and_dtypes(found, wanted)
    chex.assert_tree_all_finite(found)
    chex.assert_trees_all_close(found, wanted, atol=2e-5, rtol=2e-5)


class ReplayEquivalence(chex.TestCase, parameterized.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    @each_family
    def test_steps_equal_the_recurrence(self, family: str) -> None:
        spec, inputs, wanted, recurrent = make_case(family)
        step = self.variant(functools.partial(rs.step, spec))
        state = rs.init_state(spec, BATCH)
        outputs = []
        for t in range(TOKENS):
            o, state = step(state, tokens(inputs, t, t + 1))
            outputs.append(o)
        assert_equivalent(jnp.concatenate(outputs, axis=1), wanted)
        assert_equivalent(rs.materialize(spec, state), recurrent)

    @chex.variants(with_jit=True, without_jit=True)
    @each_family
    def test_prefill_equals_the_recurrence_and_continues(self, family: str) -> None:
        spec, inputs, wanted, recurrent = make_case(family)
        prefill = self.variant(functools.partial(rs.prefill, spec))
        first, state = prefill(rs.init_state(spec, BATCH), tokens(inputs, 0, 5))
        rest, state = prefill(state, tokens(inputs, 5, TOKENS))
        assert_equivalent(jnp.concatenate([first, rest], axis=1), wanted)
        assert_equivalent(rs.materialize(spec, state), recurrent)

    @chex.variants(with_jit=True, without_jit=True)
    @each_family
    def test_a_rejected_draft_leaves_nothing(self, family: str) -> None:
        spec, inputs, wanted, _ = make_case(family)
        state = rs.init_state(spec, BATCH, ragged=True)
        _, state = rs.prefill(spec, state, tokens(inputs, 0, 3))
        verify = self.variant(functools.partial(rs.verify, spec))
        commit = self.variant(functools.partial(rs.commit, spec))
        accepted = jnp.array([0, 1, 4])
        o, drafted = verify(state, tokens(inputs, 3, 7))
        assert_equivalent(o, wanted[:, 3:7])
        kept = commit(drafted, accepted)
        plain = rs.init_state(spec, BATCH, ragged=True)
        _, plain = rs.prefill(spec, plain, tokens(inputs, 0, 7), lengths=3 + accepted)
        assert_equivalent(rs.materialize(spec, kept), rs.materialize(spec, plain))

    @each_family
    def test_a_step_traces_once(self, family: str) -> None:
        spec, inputs, *_ = make_case(family)
        chex.clear_trace_counter()

        @jax.jit
        @chex.assert_max_traces(n=1)
        def step(state: rs.ReplayState, token: rs.TokenInputs) -> tuple[jax.Array, rs.ReplayState]:
            return rs.step(spec, state, token)

        state = rs.init_state(spec, BATCH, ragged=True)
        before = state
        for t in range(TOKENS):  # through two flushes
            _, state = step(state, tokens(inputs, t, t + 1))
        chex.assert_trees_all_equal_shapes_and_dtypes(state, before)
        chex.assert_trees_all_equal(state.pointer.length, jnp.full(BATCH, TOKENS % WINDOW))

    @each_family
    def test_vmap_equals_a_loop(self, family: str) -> None:
        spec, inputs, *_ = make_case(family)

        def run(row: rs.TokenInputs) -> tuple[jax.Array, rs.ReplayState]:
            def body(state: Any, token: Any) -> Any:
                o, state = rs.step(spec, state, jax.tree.map(lambda x: x[None, None], token))
                return state, o[0, 0]

            state, o = jax.lax.scan(body, rs.init_state(spec, 1, ragged=True), row)
            return o, state

        rows = [jax.tree.map(lambda x, i=i: x[i], inputs) for i in range(BATCH)]
        looped = jax.tree.map(lambda *x: jnp.stack(x), *map(jax.jit(run), rows))
        assert_equivalent(jax.jit(jax.vmap(run))(inputs), looped)


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    program = unittest.main(__name__, argv=[__file__, *arguments], exit=False, verbosity=2)
    return 0 if program.result.wasSuccessful() else 1


if __name__ == "__main__":
    raise SystemExit(main())
