"""The base suite on the Triton kernels, at odd shapes and at those of real layers.

The latter are cut as those of large batches: into programs of one warp that have several tiles.
"""

from typing import ClassVar

import pytest
from kernel_cases import KernelSuite, OtherCut, cut_as_for_large_batches

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
class TestTritonWhole(OtherCut, TestTriton):
    """Tiles without masks, and several of them for a head."""

    dims: ClassVar = {
        "mamba2": dict(value_dim=64, key_dim=128),
        "gated_delta_net": dict(value_dim=128, key_dim=128),
        "kda": dict(value_dim=64, key_dim=128),
        "gla": dict(value_dim=64, key_dim=32),
    }
    test_head_dims = None
