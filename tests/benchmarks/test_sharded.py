"""The benchmark of sharded decoding on virtual devices, and what it would run on two H200s."""

import collections
import json

import collectives
import device_trace
import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sharded
from device_trace import Kernel
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from replayssm_jax import dispatch
from replayssm_jax.layers.sharding import MeshAxes


@pytest.fixture
def compile_quickly():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.slow
@pytest.mark.usefixtures("compile_quickly")
def test_meshes_are_measured_and_saved(tmp_path, capsys):
    argv = ["--tiny", "--layers", "2", "--family", "gated_delta_net", "--scheme", "replay"]
    argv += ["--repeats", "2", "--threads", "2", "--out", str(tmp_path)]
    assert sharded.main(argv) == 0
    (path,) = tmp_path.glob("sharded-*.json")
    rows = {row["implementation"]: row for row in json.loads(path.read_text())["rows"]}
    assert list(rows) == ["replay 1x1", "replay 2x1", "replay 1x2"]
    one, data, model = rows.values()
    assert data["baseline_us"] == model["baseline_us"] == one["us"]
    assert not one["extra"]["collectives"] and not data["extra"]["collectives"]
    assert data["extra"]["collective_share"] == 0
    # Embedding, mixer, attention and their MLPs; then the highest logits of either half.
    assert model["extra"]["collectives"] == {
        "all-reduce f32[8,1,44]": 5,
        "all-gather f32[8,2]": 1,
        "all-gather s32[8,2]": 1,
    }
    for row in (data, model):
        assert row["extra"]["float32"]["rel_err"] < 1e-5
        assert row["extra"]["float32"]["tokens"] == 1
        strong = row["baseline_us"] / row["us"] / 2
        assert row["extra"]["strong_efficiency"] == pytest.approx(strong)
    assert "replay 1x2, batch 8" in capsys.readouterr().out


def test_patterns_are_cut_to_mixers():
    assert sharded.first_mixers("M-M-MM-A", 1) == "M-"
    assert sharded.first_mixers("M-M-MM-A", 3) == "M-M-M"
    assert sharded.first_mixers("M-M-MM-A", 6) == "M-M-MM-AM-"


def test_the_default_depth_is_the_published_one():
    args = sharded.parse(["--batch", "512"])
    for family, kinds in {
        "mamba2": {("mamba2",): 21, ("attention",): 4, (): 17},
        "gated_delta_net": {("gated_delta_net",): 24, ("attention",): 8, (): 32},
    }.items():
        config = sharded.make_config(family, args, sharded.mixers_of(family, args))
        found = collections.Counter(block.mixers for block in config.blocks)
        assert found == kinds


def test_what_moves_a_cache_or_differs_is_not_reported(monkeypatch, tmp_path, capsys):
    """The others are: here one mesh's float32 check fails, and the other's program moves a ring."""
    logits = np.zeros((8, 2))

    class Program:
        collectives, kernel, held = {}, "xla", None

        def __init__(self, mesh, check):
            self.off = float(check and mesh == "2x1")
            self.refused = "it moves a ring" if mesh == "1x2" else None

        def first(self):
            return np.zeros((8, 2), int), logits + 1 + self.off

        def contender(self):
            return harness.Contender(lambda _: None)

    def compile_all(cases, threads):
        return {key: Program(key[2], key[0] == "check") for key in cases}

    monkeypatch.setattr(sharded, "compile_all", compile_all)
    for name in ("make_model", "on_mesh"):
        monkeypatch.setattr(sharded, name, lambda *_: None)
    argv = ["--tiny", "--family", "mamba2", "--scheme", "replay", "--no-profile", "--repeats", "2"]
    assert sharded.main([*argv, "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "replay 2x1 in float32: relative error" in printed and "it moves a ring" in printed
    (path,) = tmp_path.glob("*.json")
    assert [row["implementation"] for row in json.loads(path.read_text())["rows"]] == ["replay 1x1"]


def test_efficiencies():
    times = {
        ("replay", "1x1", 4): 6.0,
        ("replay", "1x1", 8): 10.0,
        ("replay", "2x1", 8): 8.0,
        ("replay", "1x2", 8): 5.0,
        ("replay", "1x1", 2): 5.0,
        ("replay", "2x1", 2): 5.0,
    }
    times = {key: harness.Timing(us, us, us) for key, us in times.items()}
    assert sharded.efficiencies(times, "replay", "2x1", 8, 2) == {
        "efficiency": 0.75,
        "strong_efficiency": 0.625,
    }
    assert sharded.efficiencies(times, "replay", "1x2", 8, 2)["efficiency"] == 1
    assert sharded.efficiencies(times, "replay", "2x1", 2, 2)["efficiency"] is None


HLO = """
%body (p: (f32[4,8])) -> (f32[4,8]) {
  %a = bf16[64,1,300]{2,1,0} all-reduce(%dot.1), channel_id=1, to_apply=%add
  %b = bf16[64,1,300]{2,1,0} all-reduce(%dot.2), channel_id=2, to_apply=%add
  %c = (f32[64,1]{1,0}, f32[64,2]{1,0}) all-gather-start(%max), dimensions={1}
  %d = f32[64,2]{1,0} all-gather-done(%c)
  %e = (f32[64,8]{1,0}, f32[64,8]{1,0}) all-reduce(%x, %y), to_apply=%add
}
"""


def test_collectives_are_counted():
    assert collectives.collectives(HLO) == {
        "all-gather f32[64,1] f32[64,2]": 1,
        "all-reduce bf16[64,1,300]": 2,
        "all-reduce f32[64,8] f32[64,8]": 1,
    }
    assert collectives.collectives("%z = f32[4]{0} add(%all-reduce, %b)") == {}


@pytest.mark.parametrize("dims", ["64,4,10,16", "32,4,10,16", "64,2,160", "16,10,4,32"])
def test_a_collective_over_a_cache_is_refused(dims):
    cache = {"checkpoint": jax.ShapeDtypeStruct((64, 4, 10, 16), jnp.float32)}
    cache["length"] = jax.ShapeDtypeStruct((64,), jnp.int32)
    found = collectives.collectives(f"%g = f32[{dims}]{{0}} all-gather(%state)")
    with pytest.raises(collectives.MovedCache, match="checkpoint"):
        collectives.refuse_caches(found, cache, 2)
    collectives.refuse_caches(collectives.collectives(HLO), cache, 2)
    collectives.refuse_caches({"all-gather s32[64]": 1}, cache, 2)


def test_other_tokens_pass_only_where_logits_tie():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4, 2, 6)).astype(np.float32)
    logits[2, 1] = [3, 2.9999, 0, 0, 0, 0]
    tokens = logits.argmax(-1)
    same = sharded.compare("mesh", (tokens, logits), (tokens, logits), "float32")
    assert same == sharded.Agreement(0, 1, 1, None)
    # After a tie the rows have different prefixes: their logits are not compared any more.
    other, after = tokens.copy(), logits.copy()
    other[2:, 1], after[3, 1] = 1, 9
    found = sharded.compare("mesh", (other, after), (tokens, logits), "float32")
    assert (found.rel_err, found.rows, found.tokens) == (0, 0.5, 6 / 8)
    assert 0 < found.gap < sharded.TIE
    # The highest logits alone say the same, without the two tokens' distance.
    top = (other, after.max(-1)), (tokens, logits.max(-1))
    assert sharded.compare("mesh", *top, "bfloat16").gap == 0
    wrong = tokens.copy()
    wrong[1, 0] = logits[1, 0].argmin()
    with pytest.raises(harness.WrongResult, match="standard deviations apart"):
        sharded.compare("mesh", (wrong, logits), (tokens, logits), "float32")
    with pytest.raises(harness.WrongResult, match="relative error"):
        sharded.compare("mesh", (tokens, 1.01 * logits), (tokens, logits), "float32")


def test_highest_logits():
    logits = jnp.array([[0.0, 2.0, 2.0], [-3.0, -1.0, -2.0]], jnp.float32)
    top, token = jax.jit(sharded.highest)(logits)
    np.testing.assert_array_equal(top, [2, -1])
    np.testing.assert_array_equal(token, [1, 1])


def test_shares_of_a_trace():
    one = [
        Kernel("nvjet_gemm dot.3", 0, 40),
        Kernel("ncclDevKernel_AllReduce all-reduce.1", 30, 60),
        Kernel("replay_step replay_step.1", 70, 80),
        Kernel("replay_step replay_step.23", 80, 100),
    ]
    two = [Kernel("input_add_reduce_fusion", 0, 50)]
    found = device_trace.shares([one, two])
    assert found["collective_share"] == pytest.approx((0.3 + 0) / 2)
    assert found["exposed_collective_share"] == pytest.approx((0.2 + 0) / 2)
    assert found["idle_share"] == pytest.approx((0.1 + 0) / 2)
    kinds = {"collective": 0.15, "matmul": 0.2, "other": 0.5, "recurrence": 0.15}
    assert found["kernel_shares"] == pytest.approx(kinds)
    assert next(iter(found["longest_kernels"])) == "input_add_reduce_fusion"
    assert found["longest_kernels"]["replay_step replay_step"] == pytest.approx(0.15)


SPACE = """
planes { name: "/host:CPU" lines { name: "python" events { metadata_id: 1 duration_ps: 5000 } }
  event_metadata { key: 1 value { id: 1 name: "f" } } }
planes { name: "/device:GPU:0"
  lines { name: "XLA Modules" events { metadata_id: 1 duration_ps: 9000000 } }
  lines { name: "Stream #13(Compute)" timestamp_ns: 100
    events { metadata_id: 1 offset_ps: 1000 duration_ps: 4000
      stats { metadata_id: 7 str_value: "all-reduce.2" } }
    events { metadata_id: 2 offset_ps: 6000 duration_ps: 2000 } }
  event_metadata { key: 1 value { id: 1 name: "one_shot_kernel" } }
  event_metadata { key: 2 value { id: 2 name: "loop_fusion" } }
  stat_metadata { key: 7 value { id: 7 name: "hlo_op" } } }
"""


@pytest.mark.skipif(
    not hasattr(jax.profiler, "ProfileData"), reason="this jax cannot read its profiles"
)
def test_kernels_of_a_profile():
    data = jax.profiler.ProfileData
    found = device_trace.kernels(
        data.from_serialized_xspace(data.text_proto_to_serialized_xspace(SPACE))
    )
    assert found == [
        [Kernel("one_shot_kernel all-reduce.2", 101, 105), Kernel("loop_fusion", 106, 108)]
    ]
    assert [device_trace.kind(kernel.name) for kernel in found[0]] == ["collective", "other"]


H200 = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)


@pytest.mark.skipif(
    jax.__version_info__ < dispatch.OLDEST_JAX_FOR_KERNELS, reason="kernels need a newer jax"
)
@pytest.mark.parametrize(
    "family, shape, scheme", [("mamba2", (1, 2), "replay"), ("gated_delta_net", (2, 1), "replay")]
)
def test_real_models_lower_to_kernels_inside_shard_map(family, shape, scheme):
    """Two mixers call one kernel of a device's own shape; activations are no cache's size."""
    args = sharded.parse(["--layers", "2"])
    config = sharded.make_config(family, args, args.layers)
    bf16 = jnp.bfloat16
    model = nnx.eval_shape(
        lambda: sharded.HybridLM(config, rngs=nnx.Rngs(0), dtype=bf16, param_dtype=bf16)
    )
    mesh = AbstractMesh(shape, ("data", "model"), (AxisType.Auto,) * 2, abstract_device=H200)
    model.mesh_axes = MeshAxes(mesh)
    for block in model.blocks:
        for mixer in block.mixers:
            mixer.mesh_axes = model.mesh_axes
    case = sharded.Case(model, 64, scheme, args.steps, 384)
    text = case.lower().as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1
    assert "replay_step" in text
    for batch in (64, 256, 512):
        cache = sharded.Case(model, batch, scheme, args.steps, 384).shapes()[1]
        rows = batch // shape[0]
        moved = {f"all-reduce bf16[{rows},1,{config.d_model}]": 1, f"all-gather s32[{rows},2]": 1}
        collectives.refuse_caches(moved, cache, 2)


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--steps", "20"], "whole windows of 16"),
        (["--batch", "3"], "multiples of 2 devices, found 3"),
        (["--devices", "64"], "from 2 to the 8 here"),
        (["--repeats", "1"], "at least 2"),
    ],
)
def test_bad_arguments_are_refused(argv, message, capsys):
    with pytest.raises(SystemExit):
        sharded.parse(argv)
    assert message in capsys.readouterr().err
