import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.flax import save_file
from train_tiny_hybrid import PRESETS, model_config
from weights_io import (
    WeightsError,
    fill_parameters,
    load_weights,
    named_parameters,
    read_metadata,
    save_weights,
)

from replayssm_jax.models import HybridLM


@pytest.fixture(scope="module")
def model():
    return HybridLM(model_config("mamba2", PRESETS["test"]), rngs=nnx.Rngs(0))


def test_saved_weights_load_rounded_as_stated(tmp_path, model):
    path = tmp_path / "weights.safetensors"
    save_weights(path, model, record={"note": "x"})
    loaded, record = load_weights(path)
    assert record == {"note": "x"}
    assert loaded.config == model.config
    stored = named_parameters(loaded)
    for name, value in named_parameters(model).items():
        expected = value.astype(jnp.bfloat16).astype(value.dtype) if value.ndim > 1 else value
        assert stored[name].dtype == value.dtype
        np.testing.assert_array_equal(stored[name], expected, err_msg=name)
    tokens = jnp.arange(10, dtype=jnp.int32)[None]
    assert jnp.all(jnp.isfinite(loaded(tokens)))


def test_error_lists_every_name_that_does_not_fit(model):
    tensors = named_parameters(model)
    names = list(tensors)
    tensors["extra"] = tensors.pop(names[0])
    tensors["other"] = tensors.pop(names[1])
    tensors[names[2]] = jnp.zeros((1, 2, 3))
    with pytest.raises(WeightsError) as error:
        fill_parameters(model, tensors, source="file")
    message = str(error.value)
    for line in (f"missing: {names[0]}", f"missing: {names[1]}", "unexpected: extra"):
        assert line in message
    assert "unexpected: other" in message
    assert f"shape: {names[2]} is (1, 2, 3) in the file" in message


def test_file_without_config_is_an_error(tmp_path):
    path = tmp_path / "plain.safetensors"
    save_file({"x": jnp.zeros(2)}, path)
    with pytest.raises(WeightsError, match="no config and no record"):
        read_metadata(path)
