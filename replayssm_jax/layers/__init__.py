"""Flax NNX layers: `layer.init_cache(batch, size, dtype)` and `y, cache = layer(x, cache, ...)`."""

from replayssm_jax.layers.attention import Attention as Attention
from replayssm_jax.layers.block import HybridBlock as HybridBlock
from replayssm_jax.layers.cache import KVCache as KVCache
from replayssm_jax.layers.cache import MixerCache as MixerCache
from replayssm_jax.layers.cached import CachedLayer as CachedLayer
from replayssm_jax.layers.causal_conv import CausalConv as CausalConv
from replayssm_jax.layers.causal_conv import ConvCache as ConvCache
from replayssm_jax.layers.gated_delta_net import GatedDeltaNet as GatedDeltaNet
from replayssm_jax.layers.kimi_delta import KimiDeltaAttention as KimiDeltaAttention
from replayssm_jax.layers.mamba2 import Mamba2 as Mamba2
from replayssm_jax.layers.mixer import ReplayMixer as ReplayMixer
from replayssm_jax.layers.mlp import MLP as MLP
from replayssm_jax.layers.moe import MoE as MoE
from replayssm_jax.layers.norm import GatedRMSNorm as GatedRMSNorm
from replayssm_jax.layers.norm import RMSNorm as RMSNorm
from replayssm_jax.layers.progress import Progress as Progress
