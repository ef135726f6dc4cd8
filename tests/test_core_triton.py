"""The base suite on the Triton kernels, at odd shapes and at those of real layers.

The latter are cut as those of large batches: into programs of one warp that have several tiles.
"""

from typing import ClassVar

import pytest
from kernel_cases import KernelSuite, cut_as_for_large_batches

from replayssm_triton import calls, configs


@pytest.mark.gpu
class TestTriton(KernelSuite):
    implementation = "triton"

    @pytest.fixture(autouse=True)
    def needs_jax_triton(self):
        if reason := calls.why_not():
            pytest.skip(reason)


@pytest.fixture(scope="class")
def large_programs():
    with cut_as_for_large_batches(configs):
        yield


@pytest.mark.usefixtures("large_programs")
class TestTritonWhole(TestTriton):
    """Tiles without masks, and several of them for a head."""

    dims: ClassVar = {
        "mamba2": dict(value_dim=64, key_dim=128),
        "gated_delta_net": dict(value_dim=128, key_dim=128),
        "kda": dict(value_dim=64, key_dim=128),
        "gla": dict(value_dim=64, key_dim=32),
    }
    # Nothing in these depends on the cut, or they are large themselves.
    test_bf16_outputs_do_not_drift = None
    test_dtypes_are_kept = None
    test_head_dims = None
    test_jit_equals_eager = None
    test_nested_vmap_of_scan = None
    test_prefill_into_a_ring_that_is_not_empty = None
    test_resets_forget_everything_before = None
    test_rows_times_heads_beyond_a_grid_axis = None
    test_more_than_two_to_the_31_elements = None
    test_vmap_equals_the_batched_step = None
    test_windowed_scan_equals_scan = None
    test_windowed_while_loop = None
