"""The base suite on the Pallas Mosaic GPU kernels, at the smallest shapes that they take.

Small batches are cut into many narrow programs, large ones into wide programs: the suite runs once
with what these few rows get, and once with what a large batch gets.
"""

from typing import ClassVar

import pytest
from kernel_cases import KernelSuite, cut_as_for_large_batches


@pytest.mark.gpu
class TestMosaicGpu(KernelSuite):
    implementation = "mosaic_gpu"
    dims: ClassVar = {
        "mamba2": dict(value_dim=32, key_dim=32),  # a tile of state rows has two heads
        "gated_delta_net": dict(value_dim=64, key_dim=48),
        "kda": dict(value_dim=64, key_dim=32),
        "gla": dict(value_dim=64, key_dim=80),
    }


@pytest.fixture(scope="class")
def wide_programs():
    with cut_as_for_large_batches():
        yield


@pytest.mark.usefixtures("wide_programs")
class TestMosaicGpuWide(TestMosaicGpu):
    pass
