"""Command R: attention and MLP in parallel on one normalised input, interleaved rotary pairs."""

from __future__ import annotations

from dataclasses import replace

from .. import spec
from .common import attention, decoder, layer_windows, map_layers, mlp, norm
from .config_reader import ConfigReader
from .rope import rope


def cohere(c: ConfigReader) -> spec.Model:
    """A LayerNorm without bias, whose output attention and MLP share."""
    return _parallel_decoder(c.with_defaults(rope_theta=5e5))


def _parallel_decoder(c: ConfigReader) -> spec.Model:
    """The decoder of both versions: attention and MLP in parallel."""
    n = norm(c, "layer_norm_eps", kind="layer")
    attn = attention(c)
    attn = replace(
        attn,
        rope=rope(c, attn.head_dim, style="gptj"),
        qk_norm=spec.QkNorm(n) if c.flag("use_qk_norm", default=False) else None,
    )
    layer = spec.Layer(attn, mlp(c), n, None, parallel=True)
    model = decoder(c, [layer] * c.num_layers(), final_norm=n, tied=True, requires_bos=True)
    return replace(model, head=replace(model.head, scale=c.real("logit_scale", default=0.0625)))


def cohere2(c: ConfigReader) -> spec.Model:
    """Three layers with a window and RoPE, then one with full attention and no RoPE."""
    c = c.with_defaults(sliding_window=4096)  # without one, no layer would have RoPE
    pattern = c.size("sliding_window_pattern", "_sliding_window_pattern", default=4)
    sizes = layer_windows(c, c.num_layers(), lambda i: (i + 1) % pattern != 0)

    def change(i: int, layer: spec.Layer) -> spec.Layer:
        return layer.with_attention(
            lambda attn: replace(attn, window=sizes[i], rope=None if sizes[i] is None else attn.rope)
        )

    return map_layers(_parallel_decoder(c), change)
