"""HybridConfig: the static description of a hybrid language model, to and from JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import jax.numpy as jnp

from replayssm_jax.arguments import check_choice, check_type
from replayssm_jax.layers.activations import Activation
from replayssm_jax.layers.moe import Scoring
from replayssm_jax.layers.options import Options
from replayssm_jax.precision import state_dtype_of

MixerKind = Literal["mamba2", "gated_delta_net", "kda", "attention"]
MLPKind = Literal["swiglu", "relu2", "moe"]

MIXERS = ("mamba2", "gated_delta_net", "kda", "attention")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba2Config(Options):
    """Options of `layers.Mamba2`; `num_heads` None means 2 * d_model / head_dim.

    Integers are at least 1, `norm_epsilon` at least 0, and `dt_limits` 0 <= lower <= upper.
    """

    num_heads: int | None = None
    head_dim: int = 64
    state_dim: int = 128
    num_groups: int = 1
    conv_kernel: int = 4
    conv_bias: bool = True
    proj_bias: bool = False
    use_dt_bias: bool = True
    use_D: bool = True
    dt_limits: tuple[float, float] = (0.0, float("inf"))
    gated_norm: bool = True
    norm_before_gate: bool = False
    norm_groups: int | None = None
    norm_epsilon: float = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDeltaNetConfig(Options):
    """Options of `layers.GatedDeltaNet`; `num_key_heads` None means d_model / value_dim.

    Integers are at least 1 and `norm_epsilon` at least 0.
    """

    num_key_heads: int | None = None
    num_value_heads: int | None = None
    key_dim: int = 128
    value_dim: int = 128
    conv_kernel: int = 4
    conv_bias: bool = False
    proj_bias: bool = False
    use_dt_bias: bool = True
    allow_neg_eigval: bool = False
    norm_epsilon: float = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class KDAConfig(Options):
    """Options of `layers.KimiDeltaAttention`; `num_heads` None means d_model / value_dim.

    Integers are at least 1, `gate_rank` and `norm_epsilon` at least 0; `lower_bound` is None or
    negative.
    """

    num_heads: int | None = None
    key_dim: int = 128
    value_dim: int = 128
    gate_rank: int | None = None
    lower_bound: float | None = None
    conv_kernel: int = 4
    conv_bias: bool = False
    proj_bias: bool = False
    gate_bias: bool = False
    use_dt_bias: bool = True
    norm_epsilon: float = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig(Options):
    """Options of `layers.Attention`; `num_heads` None means d_model / 64, or 1.

    Integers are at least 1, `sliding_window` among them, and `norm_epsilon` at least 0.
    `rope_fraction` lies in [0, 1], where 0 is no position embedding; `rope_base` is above 0.
    """

    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    rope_fraction: float = 1.0
    rope_base: float = 10000.0
    qk_norm: bool = False
    output_gate: bool = False
    sliding_window: int | None = None
    scale: float | None = None
    proj_bias: bool = False
    out_bias: bool = False
    norm_epsilon: float = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig(Options):
    """Options of `layers.MoE`; `d_expert` None means the width of the dense MLPs.

    Integers are at least 1, `d_shared` at least 0; `activation` is one of those of `layers.MLP`.
    """

    num_experts: int = 8
    top_k: int = 2
    d_expert: int | None = None
    d_shared: int = 0
    shared_gate: bool = False
    scoring: Scoring = "softmax"
    normalise: bool = True
    routed_scale: float = 1.0
    selection_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    activation: Activation = "silu"
    gated: bool = True


@dataclasses.dataclass(frozen=True)
class LayerConfig(Options):
    """One block.

    Attributes:
      mixers: run side by side on the same input and summed; may be empty.
      mlp: what follows them, or None.
      norm: "pre" normalises the input of mixers and MLP, "post" their outputs.
    """

    mixers: tuple[MixerKind, ...] = ()
    mlp: MLPKind | None = None
    norm: Literal["pre", "post"] = "pre"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "mixers", _as_tuple("mixers", self.mixers, "names"))
        for mixer in self.mixers:
            check_choice("mixer", mixer, MIXERS)
        if not self.mixers and self.mlp is None:
            raise ValueError("a layer needs a mixer or an MLP, found neither")


def _as_tuple(name: str, values: Any, kind: str) -> tuple[Any, ...]:
    """Several `values` as a tuple; a string is none."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a tuple of {kind}, found {values!r}")
    return tuple(values)


_SUBCONFIGS: dict[str, type] = {
    "mamba2": Mamba2Config,
    "gated_delta_net": GatedDeltaNetConfig,
    "kda": KDAConfig,
    "attention": AttentionConfig,
    "moe": MoEConfig,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class HybridConfig(Options):
    """A hybrid language model; hashable by value, JSON through `to_dict` and `from_dict`.

    Integers are at least 1 and other numbers finite.

    Attributes:
      vocab_size: tokens.
      d_model: width of the residual stream.
      pattern: one letter a block: M the `mixer`, A attention, each followed by the `mlp`; "-" the
        `mlp` alone.
      mixer: the replay mixer that M stands for.
      mlp: the MLP of every block, or None.
      d_ff: its inner width; None means 4 d_model (relu2) or 8/3 d_model, in multiples of 16.
      layers: None, or an explicit list of `LayerConfig` instead of the pattern.
      mamba2, gated_delta_net, kda, attention, moe: options of each kind.
      norm_epsilon: of the RMS norms before mixers and MLPs and at the end, at least 0.
      tie_embeddings: whether the output projection is the embedding.
      embedding_scale, residual_scale, logit_scale: multipliers of the embeddings, of every branch
        as it joins the residual stream, and of the logits.
      replay_window: records that a replay ring may hold before it is folded.
      max_tokens: most drafts that one `verify` takes; of replay layers at most `replay_window`.
      state_dtype: of recurrent states: "float32", or "bfloat16", "float16", "float8_e4m3fn",
        "float8_e5m2" or "int8"; see `ReplaySpec`.
      read_dtype: None, or the low-precision format of the copies of float32 states that decoding
        reads.
      remat: whether training recomputes each block in the backward pass.
      scan_layers: whether the repeated unit of blocks has stacked parameters and is scanned, so
        that compile time does not grow with depth.
    """

    vocab_size: int
    d_model: int
    pattern: str = "MMMA"
    mixer: MixerKind = "mamba2"
    mlp: MLPKind | None = "swiglu"
    d_ff: int | None = None
    layers: tuple[LayerConfig, ...] | None = None
    mamba2: Mamba2Config = Mamba2Config()
    gated_delta_net: GatedDeltaNetConfig = GatedDeltaNetConfig()
    kda: KDAConfig = KDAConfig()
    attention: AttentionConfig = AttentionConfig()
    moe: MoEConfig = MoEConfig()
    norm_epsilon: float = 1e-6
    tie_embeddings: bool = True
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    replay_window: int = 16
    max_tokens: int = 1
    state_dtype: str = "float32"
    read_dtype: str | None = None
    remat: bool = False
    scan_layers: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, wide in (("state_dtype", (jnp.float32, jnp.float64)), ("read_dtype", ())):
            if name == "state_dtype" or self.read_dtype is not None:  # by name, for JSON
                found = state_dtype_of(name, getattr(self, name), wide)
                object.__setattr__(self, name, found.name)
        if not isinstance(self.pattern, str):
            raise TypeError(f"pattern must be a string of letters, found {self.pattern!r}")
        if self.layers is not None:
            object.__setattr__(self, "layers", _as_tuple("layers", self.layers, "LayerConfig"))
            for i, layer in enumerate(self.layers):
                check_type(f"layers[{i}]", layer, LayerConfig)
        if not self.blocks:
            raise ValueError("the model needs at least one layer, found none")
        replays = any(set(block.mixers) - {"attention"} for block in self.blocks)
        if replays and self.max_tokens > self.replay_window:
            raise ValueError(
                f"max_tokens must be at most replay_window, found max_tokens={self.max_tokens} "
                f"and replay_window={self.replay_window}"
            )

    @property
    def blocks(self) -> tuple[LayerConfig, ...]:
        """The blocks in order, whichever way they were given."""
        if self.layers is not None:
            return self.layers
        kinds: dict[str, tuple[MixerKind, ...]] = {
            "M": (self.mixer,),
            "A": ("attention",),
            "-": (),
        }
        unknown = sorted(set(self.pattern) - set(kinds))
        if unknown:
            raise ValueError(f"pattern may hold the letters {list(kinds)}, found {unknown}")
        return tuple(LayerConfig(kinds[letter], self.mlp) for letter in self.pattern)

    @property
    def segments(self) -> tuple[tuple[tuple[LayerConfig, ...], int], ...]:
        """Runs of blocks with how often each repeats; one run, once, without `scan_layers`."""
        blocks = self.blocks
        if not self.scan_layers:
            return ((blocks, 1),)
        start, width, count = _repeated_unit(blocks)
        end = start + width * count
        runs = ((blocks[:start], 1), (blocks[start : start + width], count), (blocks[end:], 1))
        return tuple(run for run in runs if run[0])

    @property
    def inner_width(self) -> int:
        """Width of the MLPs."""
        if self.d_ff is not None:
            return self.d_ff
        wanted = self.d_model * 4 if self.mlp == "relu2" else self.d_model * 8 / 3
        return max(16, 16 * round(wanted / 16))

    def to_dict(self) -> dict[str, Any]:
        """Return the config as JSON-ready values; an infinite dt limit becomes None."""
        config = dataclasses.asdict(self)
        low, high = self.mamba2.dt_limits
        config["mamba2"]["dt_limits"] = [low, None if high == float("inf") else high]
        return config

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> HybridConfig:
        """Build the config from what `to_dict` returned, also after a trip through JSON."""
        values = dict(config)
        for name, kind in _SUBCONFIGS.items():
            if isinstance(values.get(name), Mapping):
                options = dict(values[name])
                limits = options.get("dt_limits")
                if isinstance(limits, list | tuple) and len(limits) == 2 and limits[1] is None:
                    options["dt_limits"] = (limits[0], float("inf"))
                values[name] = kind(**options)
        if isinstance(values.get("layers"), list | tuple):
            values["layers"] = tuple(
                LayerConfig(**layer) if isinstance(layer, Mapping) else layer
                for layer in values["layers"]
            )
        return cls(**values)


def _repeated_unit(blocks: tuple[LayerConfig, ...]) -> tuple[int, int, int]:
    """Start, width and count of the repeated run that leaves the fewest blocks to trace."""
    best = (0, len(blocks), 1)
    fewest = len(blocks)
    for width in range(1, len(blocks) // 2 + 1):
        for start in range(len(blocks) - width):
            unit = blocks[start : start + width]
            count = 1
            while blocks[start + count * width : start + (count + 1) * width] == unit:
                count += 1
            traced = len(blocks) - (count - 1) * width
            if traced < fewest:
                best, fewest = (start, width, count), traced
    return best
