"""The base suite on the Pallas Mosaic GPU kernels, at the smallest shapes that they take.

Small batches are cut into many narrow programs, large ones into wide programs: the suite runs once
with what these few rows get, and once with what a large batch gets.
"""

from typing import ClassVar

import pytest
from kernel_cases import KernelSuite, check_snapshots, cut_as_for_large_batches


@pytest.mark.gpu
class TestMosaicGpu(KernelSuite):
    implementation = "mosaic_gpu"
    dims: ClassVar = {
        "mamba2": dict(value_dim=32, key_dim=32),  # a tile of state rows has two heads
        "gated_delta_net": dict(value_dim=64, key_dim=48),
        "kda": dict(value_dim=128, key_dim=32),  # two tiles for wide programs
        "gla": dict(value_dim=64, key_dim=80),
    }

    def test_snapshots(self, family):
        check_snapshots(self.make_spec(family, max_tokens=3), self.implementation)


@pytest.fixture(scope="class")
def wide_programs():
    with cut_as_for_large_batches():
        yield


@pytest.mark.usefixtures("wide_programs")
class TestMosaicGpuWide(TestMosaicGpu):
    # Nothing in these depends on the cut, or they are large themselves.
    test_bf16_outputs_do_not_drift = None
    test_dtypes_are_kept = None
    test_jit_equals_eager = None
    test_nested_vmap_of_scan = None
    test_prefill_into_a_ring_that_is_not_empty = None
    test_resets_forget_everything_before = None
    test_rows_times_heads_beyond_a_grid_axis = None
    test_more_than_two_to_the_31_elements = None
    test_vmap_equals_the_batched_step = None
    test_windowed_scan_equals_scan = None
    test_windowed_while_loop = None
