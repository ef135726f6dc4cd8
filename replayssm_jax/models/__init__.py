"""Hybrid language models."""

from replayssm_jax.models.cache import HybridCache as HybridCache
from replayssm_jax.models.config import AttentionConfig as AttentionConfig
from replayssm_jax.models.config import GatedDeltaNetConfig as GatedDeltaNetConfig
from replayssm_jax.models.config import HybridConfig as HybridConfig
from replayssm_jax.models.config import KDAConfig as KDAConfig
from replayssm_jax.models.config import LayerConfig as LayerConfig
from replayssm_jax.models.config import Mamba2Config as Mamba2Config
from replayssm_jax.models.config import MoEConfig as MoEConfig
from replayssm_jax.models.hybrid import HybridLM as HybridLM
from replayssm_jax.models.mtp import MTPHeads as MTPHeads
from replayssm_jax.models.mtp import distillation_loss as distillation_loss
from replayssm_jax.models.partition import partition_specs as partition_specs
from replayssm_jax.models.partition import shard_model as shard_model
from replayssm_jax.models.restack import stack_layers as stack_layers
from replayssm_jax.models.restack import unstack_layers as unstack_layers
