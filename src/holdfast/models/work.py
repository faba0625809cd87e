"""About how much work a token is: the multiplications with weights, of which a mixture uses a part.

Attention's and states' own work is left out, which depends on the history, and so are convolutions.
"""

from __future__ import annotations

from holdfast.models.config import (
    AttentionConfig,
    DeltaConfig,
    ExpertsConfig,
    LayerConfig,
    Mamba2Config,
    MixerConfig,
    MlpConfig,
    ModelConfig,
)

__all__ = ["work_of"]


def work_of(config: ModelConfig) -> int:
    """The weights that a token is multiplied with."""
    layers = sum(_layer(layer, config.width) for layer in config.layers)
    return layers + config.width * config.vocabulary


def _layer(layer: LayerConfig, width: int) -> int:
    mixers = sum(_mixer(mixer, width) for mixer in layer.mixers)
    match layer.mlp:
        case None:
            return mixers
        case MlpConfig():
            return mixers + _mlp(layer.mlp, width)
        case ExpertsConfig():
            return mixers + _experts(layer.mlp, width)


def _mixer(mixer: MixerConfig, width: int) -> int:
    match mixer:
        case AttentionConfig():
            queries = mixer.heads * (2 if mixer.output_gate else 1)
            inputs = mixer.input_width or width
            return mixer.head_dim * (inputs * (queries + 2 * mixer.kv_heads) + width * mixer.heads)
        case Mamba2Config():
            return width * (2 * mixer.width + mixer.convolution_channels + mixer.heads)
        case DeltaConfig():
            values = mixer.value_heads * mixer.value_dim
            return width * (2 * values + mixer.convolution_channels + 2 * mixer.value_heads)


def _mlp(mlp: MlpConfig, width: int) -> int:
    return width * mlp.width * (3 if mlp.gated else 2)


def _experts(experts: ExpertsConfig, width: int) -> int:
    inner = experts.latent or width
    each = inner * experts.width * (3 if experts.gated else 2)
    shared = 0 if experts.shared is None else _mlp(experts.shared, width)
    gate = width if experts.shared_gate else 0
    latent = 0 if experts.latent is None else 2 * width * experts.latent
    return experts.experts_per_token * each + shared + gate + latent + width * experts.experts
