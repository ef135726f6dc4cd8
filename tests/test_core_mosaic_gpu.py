"""The base suite on the Pallas Mosaic GPU kernels, at the smallest shapes that they take.

Small batches are cut into many narrow programs, large ones into wide programs: the suite runs once
with what these few rows get, and once with what a large batch gets.
"""

import functools
from typing import ClassVar

import pytest
from base import GATES
from kernel_cases import (
    KernelSuite,
    OtherCut,
    check_nan_row,
    check_read_copies,
    check_snapshots,
    check_who_reads_what,
    check_windowed_loop,
    cut_as_for_large_batches,
    records_follow,
)
from oracle import make_spec

import replayssm_jax as rs


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

    def test_read_copies(self, family):
        make = functools.partial(self.make_spec, family, window=5)
        names = ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8"]
        check_read_copies(make, self.implementation, names)

    @pytest.mark.parametrize("read_dtype", [None, "bfloat16", "int8"])
    def test_windowed_loop(self, family, read_dtype):
        check_windowed_loop(self.make_spec(family, read_dtype=read_dtype), self.implementation)

    def test_a_row_of_a_read_copy_that_is_not_finite(self, family):
        make = functools.partial(self.make_spec, family)
        names = ["bfloat16", "float16", "float8_e4m3fn", "int8"]
        check_nan_row(make, self.implementation, names)

    @pytest.mark.parametrize("batch_size", [1, 16, 99])
    def test_identical_launches_with_a_read_copy(self, family, batch_size):
        spec = self.make_spec(family, window=5, max_tokens=3, read_dtype="int8")
        self.check_identical_launches(spec, batch_size)

    def test_drafts_with_a_read_copy(self, family):
        make = functools.partial(self.make_spec, family, window=5, max_tokens=2)
        check_read_copies(make, self.implementation, ["float16", "int8"])

    @pytest.mark.parametrize("delta", ["gated_delta_net", "kda"])
    def test_who_reads_what_of_the_ring(self, delta):
        spec = self.make_spec(delta, window=4, max_tokens=2, read_dtype="int8")
        check_who_reads_what(spec, self.implementation)

    @pytest.mark.parametrize("window", [32, 64])
    def test_longer_windows_with_a_read_copy(self, family, window):
        make = functools.partial(self.make_spec, family, window=window)
        check_read_copies(make, self.implementation, ["bfloat16"])

    @pytest.mark.parametrize("value_dim, key_dim", [(80, 96), (96, 128), (128, 64), (64, 256)])
    def test_head_dims_with_a_read_copy(self, value_dim, key_dim):
        """Tiles of several heads under the delta rule, and bf16 keys."""
        make = functools.partial(
            rs.ReplaySpec.gated_delta_net,
            num_value_heads=8,
            num_key_heads=2,
            value_dim=value_dim,
            key_dim=key_dim,
        )
        check_read_copies(make, self.implementation, ["float8_e4m3fn", "int8"])

    @pytest.mark.parametrize("gates", [None, GATES], ids=["", "of all sizes"])
    @pytest.mark.parametrize("key_dim, window", [(48, 16), (64, 12), (96, 32), (256, 16)])
    def test_key_dims_by_channel_with_a_read_copy(self, key_dim, window, gates):
        """How warps share the channels of keys that meet in a fold, and gates of all sizes."""
        dims = dict(num_heads=2, key_dim=key_dim, value_dim=64, window=window)
        make = functools.partial(rs.ReplaySpec.kda, **dims)
        check_read_copies(make, self.implementation, ["int8"], gates)

    @pytest.mark.parametrize("max_tokens", [1, 2])
    def test_nemotron_heads_with_a_read_copy(self, max_tokens):
        make = functools.partial(
            rs.ReplaySpec.mamba2,
            num_heads=16,
            num_groups=2,
            head_dim=64,
            state_dim=128,
            max_tokens=max_tokens,
        )
        check_read_copies(make, self.implementation, ["bfloat16", "int8"])

    @pytest.mark.parametrize("window", [16, 32])
    def test_kimi_heads_with_a_read_copy(self, window):
        make = functools.partial(
            rs.ReplaySpec.kda, num_heads=2, key_dim=128, value_dim=128, window=window
        )
        check_read_copies(make, self.implementation, ["bfloat16", "int8", "float8_e4m3fn"])

    def test_float16_keys_with_a_read_copy(self):
        make = functools.partial(
            rs.ReplaySpec.gated_delta_net,
            num_value_heads=4,
            num_key_heads=2,
            key_dim=128,
            value_dim=128,
            key_dtype="float16",
        )
        check_read_copies(make, self.implementation, ["bfloat16", "int8"])


@pytest.fixture(scope="class")
def wide_programs():
    with cut_as_for_large_batches():
        yield


@pytest.mark.usefixtures("wide_programs")
class TestMosaicGpuWide(OtherCut, TestMosaicGpu):
    test_longer_windows_with_a_read_copy = None

    @pytest.mark.parametrize("window", [5, 16, 32])
    @pytest.mark.parametrize("read_dtype", ["bfloat16", "float16", "float8_e4m3fn", "int8"])
    def test_records_that_follow_tiles(self, read_dtype, window):
        spec = rs.ReplaySpec.mamba2(
            num_heads=16,
            num_groups=2,
            head_dim=64,
            state_dim=128,
            window=window,
            read_dtype=read_dtype,
        )
        assert records_follow(spec, 2)
        check_windowed_loop(spec, self.implementation)

    def test_records_that_follow_tiles_with_channel_decay(self):
        dims = dict(num_heads=2, num_groups=2, value_dim=256, key_dim=128)
        spec = make_spec("gla", window=8, read_dtype="int8", **dims)
        assert records_follow(spec, 2)
        check_windowed_loop(spec, self.implementation)
