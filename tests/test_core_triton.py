"""The base suite on the Triton kernels, at odd shapes and at those of real layers.

The latter are cut as those of large batches: into programs of one warp that have several tiles.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
import pytest
from kernel_cases import KernelSuite, OtherCut, cut_as_for_large_batches
from oracle import assert_close, random_inputs, reference

import replayssm_jax as rs
from replayssm_triton import calls, configs


@pytest.mark.gpu
class TestTriton(KernelSuite):
    implementation = "triton"

    @pytest.fixture(autouse=True)
    def needs_jax_triton(self):
        if reason := calls.why_not():
            pytest.skip(reason)

    def test_a_body_that_steps_twice_is_loud(self, family):
        """Here it is right: the kernel looks at the pointer, whatever the loop believes."""
        spec = self.make_spec(family)
        inputs = random_inputs(spec, 1, 80)

        def body(state, pair):
            outputs = []
            for i in range(2):
                one = jax.tree.map(lambda x, i=i: x[i][:, None], pair)
                output, state = self.step(spec, state, one)
                outputs.append(output[:, 0])
            return state, jnp.stack(outputs)

        pairs = jax.tree.map(
            lambda x: jnp.moveaxis(x, 1, 0).reshape(40, 2, 1, *x.shape[2:]), inputs
        )
        state, outputs = rs.scan_steps(body, rs.init_state(spec, 1), pairs)
        expected, expected_state = reference(spec, inputs)
        assert_close(jnp.moveaxis(outputs.reshape(80, 1, *outputs.shape[3:]), 0, 1), expected)
        assert_close(rs.materialize(spec, state), expected_state, name="state")


@pytest.fixture(scope="class")
def large_programs():
    with cut_as_for_large_batches(configs):
        yield


@pytest.mark.usefixtures("large_programs")
class TestTritonWhole(OtherCut, TestTriton):
    """Tiles without masks, and several of them for a head."""

    dims: ClassVar = {
        "mamba2": dict(value_dim=64, key_dim=128),
        "gated_delta_net": dict(value_dim=128, key_dim=128),
        "kda": dict(value_dim=64, key_dim=128),
        "gla": dict(value_dim=64, key_dim=32),
    }
    test_head_dims = None
