"""The base suite on the Triton kernels, at odd shapes and at those of real layers."""

from typing import ClassVar

import pytest
from kernel_cases import KernelSuite

from replayssm_triton import calls


@pytest.mark.gpu
class TestTriton(KernelSuite):
    implementation = "triton"

    @pytest.fixture(autouse=True)
    def needs_jax_triton(self):
        if reason := calls.why_not():
            pytest.skip(reason)


class TestTritonWhole(TestTriton):
    """Tiles without masks, and several of them for a head."""

    dims: ClassVar = {
        "mamba2": dict(value_dim=64, key_dim=128),
        "gated_delta_net": dict(value_dim=128, key_dim=128),
        "kda": dict(value_dim=32, key_dim=64),
        "gla": dict(value_dim=64, key_dim=32),
    }
