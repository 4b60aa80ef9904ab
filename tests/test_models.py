"""FLA's own models on our kernels: FLA's code unmodified, one import, the same logits and tokens.

A model runs three times on the same tokens: on FLA's kernels, on ours, and in float32 on our
reference. Ours has to be as near to the last as FLA's is, and to choose the same tokens wherever
that choice does not hang on rounding.
"""

from contextlib import contextmanager, nullcontext

import pytest
import torch

from cula.common.fla import fla_alone, fla_missing
from cula.common.testing import rel_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(fla_missing() is not None, reason=str(fla_missing())),
]

LENGTHS = (5, 70, 130)  # below and above what FLA's layer sends to its recurrent kernel
NEW_TOKENS = 8


@contextmanager
def reference():
    """Our reference in place of any kernel, whatever was decided before."""
    takeovers = [module._takeover for module in adapters()]
    patch = pytest.MonkeyPatch()
    patch.setenv("CULA_BACKEND", "reference")
    try:
        for takeover in takeovers:
            for adapter in takeover.adapters:
                adapter.accepted.clear()
        yield
    finally:
        patch.undo()
        for takeover in takeovers:
            for adapter in takeover.adapters:
                adapter.accepted.clear()


def adapters():
    import cula.decode.fla
    import cula.kda.fla
    import cula.lightning.fla

    return cula.decode.fla, cula.kda.fla, cula.lightning.fla


def kda_model(device, dtype, hidden=256, head_dim=64, layers=2, **config):
    models = pytest.importorskip("fla.models.kda", exc_type=ImportError)
    torch.manual_seed(0)
    made = models.KDAForCausalLM(
        models.KDAConfig(
            hidden_size=hidden,
            head_dim=head_dim,
            num_heads=hidden // head_dim,
            num_hidden_layers=layers,
            vocab_size=97,
            fuse_cross_entropy=False,
            initializer_range=0.2,  # logits far enough apart
            **config,
        )
    )
    return made.to(device, dtype).eval()


@torch.no_grad()
def generate(model, prompts, follow=None, steps=NEW_TOKENS):
    """Prefill prompts of mixed lengths (padded on the left), then token by token with the cache.

    Args:
        follow: the tokens to continue with, [steps, B]; without it the model's own choice.

    Returns:
        The logits after each of the steps + 1 calls, [steps + 1, B, vocabulary], and the tokens.
    """
    longest, device = max(len(p) for p in prompts), prompts[0].device
    ids = torch.zeros(len(prompts), longest, dtype=torch.long, device=device)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    cache, logits, tokens = None, [], []
    for step in range(steps + 1):
        done = model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
        cache = done.past_key_values
        logits.append(done.logits[:, -1].float())
        if step < steps:
            tokens.append(logits[-1].argmax(-1) if follow is None else follow[step])
            ids = tokens[-1][:, None]
            mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
    return torch.stack(logits), torch.stack(tokens) if tokens else None


def compare(model, exact_model, prompts, steps=NEW_TOKENS):
    """Run all three and compare; returns the relative errors of FLA's logits and ours."""
    with reference():
        exact, tokens = generate(exact_model, prompts, steps=steps)
    with fla_alone():
        theirs, _ = generate(model, prompts, tokens, steps)
    ours, _ = generate(model, prompts, tokens, steps)
    their_error, our_error = rel_error(theirs, exact), rel_error(ours, exact)
    assert our_error <= 1.5 * their_error + 1e-4, (our_error, their_error)
    noise = 4 * (theirs - exact).abs().amax()
    best = exact.topk(2, dim=-1).values
    clear = best[..., 0] - best[..., 1] > noise
    assert torch.equal(ours.argmax(-1)[clear], exact.argmax(-1)[clear])
    return their_error, our_error


def prompts_of(device, lengths=LENGTHS):
    torch.manual_seed(1)
    return [torch.randint(3, 97, (n,), device=device) for n in lengths]


@pytest.mark.parametrize(
    "config", [{}, {"safe_gate": True, "lower_bound": -5.0}, {"num_v_heads": 8}]
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_kda_language_model(config, head_dim):
    adapters()
    made = {"head_dim": head_dim, **config}
    model = kda_model("cuda", torch.bfloat16, **made)
    exact = kda_model("cuda", torch.float32, **made)
    exact.load_state_dict(model.state_dict())
    compare(model, exact, prompts_of("cuda"))


def test_decoding_is_ours():
    """The kernels that were meant: decode steps do not fall back."""
    decode, _, _ = adapters()
    model = kda_model("cuda", torch.bfloat16)
    inner = decode._takeover.adapters[0]
    inner.accepted.clear()
    generate(model, prompts_of("cuda"), steps=2)
    assert inner.accepted


def kda_layer(device, dtype):
    layers = pytest.importorskip("fla.layers.kda", exc_type=ImportError)
    torch.manual_seed(0)
    layer = layers.KimiDeltaAttention(hidden_size=512, head_dim=128, num_heads=4, layer_idx=0)
    return layer.to(device, dtype).eval()


@pytest.mark.parametrize("mode", [nullcontext, torch.inference_mode])
@pytest.mark.parametrize("tokens", [1, 64, 200])
def test_kda_layer(tokens, mode):
    adapters()
    layer = kda_layer("cuda", torch.bfloat16)
    x = torch.randn(2, tokens, 512, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad(), mode():
        with fla_alone():
            theirs = layer(x)[0]
        ours = layer(x)[0]
        with torch.autocast("cuda", torch.bfloat16):
            cast = layer(x)[0]
    assert rel_error(ours, theirs) < 1e-2
    assert rel_error(cast, ours) < 1e-2


def test_training_takes_fla_s_gradients():
    adapters()
    layer = kda_layer("cuda", torch.bfloat16).train()
    x = torch.randn(2, 100, 512, device="cuda", dtype=torch.bfloat16)

    def gradients():
        layer.zero_grad()
        layer(x)[0].float().square().mean().backward()
        return {name: p.grad.clone() for name, p in layer.named_parameters()}

    with fla_alone():
        theirs = gradients()
    for name, ours in gradients().items():
        assert rel_error(ours, theirs[name]) < 2e-2, name


def kimi_linear_model(device, dtype, head_dim=64):
    """transformers' Kimi-Linear: gates and beta computed before the call, K-first states."""
    transformers = pytest.importorskip("transformers", exc_type=ImportError)
    if not hasattr(transformers, "KimiLinearForCausalLM"):
        pytest.skip("this version of transformers has no Kimi-Linear")
    config = transformers.KimiLinearConfig(
        vocab_size=97,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        linear_num_heads=2,
        linear_head_dim=head_dim,
        layer_types=["linear_attention", "full_attention"],
        mlp_layer_types=["dense", "dense"],
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    return transformers.KimiLinearForCausalLM(config).to(device, dtype).eval()


def test_transformers_kimi_linear():
    adapters()
    model = kimi_linear_model("cuda", torch.bfloat16)
    exact = kimi_linear_model("cuda", torch.float32)
    exact.load_state_dict(model.state_dict())
    # Prompts of one length: transformers runs this layer over the padding too.
    compare(model, exact, prompts_of("cuda", (70, 70)))


class LightningLayer(torch.nn.Module):
    """FLA has no layer around its Lightning Attention; this is the smallest there can be."""

    def __init__(self, hidden, heads, layer_idx, layers):
        super().__init__()
        self.heads, self.layer_idx, self.layers = heads, layer_idx, layers
        self.qkv = torch.nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = torch.nn.Linear(hidden, hidden, bias=False)

    def forward(self, x, state=None):
        from fla.ops import lightning_attn

        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        name = "chunk" if x.shape[1] > 1 else "fused_recurrent"
        function = getattr(lightning_attn, f"{name}_lightning_attn")
        o, state = function(
            q, k, v, self.layer_idx, self.layers, initial_state=state, output_final_state=True
        )
        return self.out(o.flatten(-2)), state


@torch.no_grad()
def lightning_run(layer, x, prompt):
    """A prefill, then the rest token by token."""
    o, state = layer(x[:, :prompt])
    outputs = [o]
    for t in range(prompt, x.shape[1]):
        o, state = layer(x[:, t : t + 1], state)
        outputs.append(o)
    return torch.cat(outputs, 1)


def compare_lightning(device, dtype, hidden=512, heads=4, prompt=128, tokens=136):
    """Errors of FLA's and our outputs against float32 on our reference."""
    _, _, lightning = adapters()
    torch.manual_seed(0)
    layer = LightningLayer(hidden, heads, 1, 4).to(device, dtype)
    exact = LightningLayer(hidden, heads, 1, 4).to(device)
    exact.load_state_dict(layer.state_dict())
    x = torch.randn(2, tokens, hidden, device=device, dtype=dtype)
    with lightning.patch_fla():
        with fla_alone():
            theirs = lightning_run(layer, x, prompt)
        ours = lightning_run(layer, x, prompt)
        with reference():
            right = lightning_run(exact, x.float(), prompt)
    their_error, our_error = rel_error(theirs, right), rel_error(ours, right)
    assert our_error <= 1.5 * their_error + 1e-4, (our_error, their_error)
    return their_error, our_error


def test_lightning_prefill_and_generation():
    compare_lightning("cuda", torch.bfloat16)


def test_retention_layer():
    """Its decay per head is Lightning's case too; its generation runs on our decode kernel."""
    layers = pytest.importorskip("fla.layers.multiscale_retention", exc_type=ImportError)
    _, _, lightning = adapters()
    torch.manual_seed(0)
    layer = layers.MultiScaleRetention(hidden_size=512, num_heads=4, expand_v=1.0, layer_idx=0)
    layer = layer.to("cuda", torch.bfloat16).eval()
    x = torch.randn(2, 128, 512, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad(), lightning.patch_fla():
        with fla_alone():
            theirs = layer(x)[0]
        ours = layer(x)[0]
    assert rel_error(ours, theirs) < 1e-2
