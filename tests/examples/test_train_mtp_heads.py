import jax
import jax.numpy as jnp
import pytest
import train_mtp_heads
from decode_text import WEIGHTS
from flax import nnx
from stdlib_text import load_corpus
from weights_io import read_metadata

from replayssm_jax.models import MTPHeads


def test_heads_are_saved_and_loaded_in_bf16(tmp_path):
    heads = MTPHeads(16, num_heads=2, d_ff=8, rngs=nnx.Rngs(3))
    path = tmp_path / "heads.safetensors"
    train_mtp_heads.save_heads(path, heads, d_ff=8, record={"steps": 1})
    loaded = train_mtp_heads.load_heads(path)
    assert loaded.d_model == 16 and len(loaded.heads) == 2
    pairs = zip(*(jax.tree.leaves(nnx.state(h)) for h in (loaded, heads)), strict=True)
    for found, wanted in pairs:
        assert found.dtype == jnp.float32
        assert jnp.array_equal(found, wanted.astype(jnp.bfloat16).astype(jnp.float32))


def test_shipped_heads_fit_their_models_and_are_small():
    paths = sorted(WEIGHTS.glob("*-mtp.safetensors"))
    assert paths
    for path in paths:
        assert path.stat().st_size < 200_000
        family = path.name.removesuffix("-mtp.safetensors")
        config, _ = read_metadata(WEIGHTS / f"{family}.safetensors")
        assert train_mtp_heads.load_heads(path).d_model == config.d_model


@pytest.mark.slow
def test_a_few_steps_bring_the_loss_down(source_tree, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(train_mtp_heads, "load_corpus", lambda: load_corpus(source_tree))
    options = ["--family", "mamba2", "--steps", "8", "--batch", "2", "--context", "24"]
    with jax.numpy_dtype_promotion("standard"):
        assert train_mtp_heads.main([*options, "--out", str(tmp_path)]) == 0
    first, last = capsys.readouterr().out.split("mamba2: ")[1].split(" nats")[0].split(" -> ")
    assert float(last) < float(first)
    assert train_mtp_heads.heads_path("mamba2", tmp_path).exists()


def test_windows_must_hold_the_drafts(capsys):
    with pytest.raises(SystemExit):
        train_mtp_heads.parse(["--context", "4"])
    assert "at least --drafts + 2" in capsys.readouterr().err
