"""Every Python block of the documents runs, every command and link in them exists."""

import re
import tomllib

import jax
import jax.numpy as jnp
import pytest
from documents import ROOT, python_blocks, run_blocks

import replayssm_jax as rs

DOCUMENTS = {name: (ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md")}
README = DOCUMENTS["README.md"]
TEXT = "\n".join(DOCUMENTS.values())
BLOCKS = [block for name in DOCUMENTS for block in python_blocks(ROOT / name)]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: b.name)
def test_python_block_runs(block):
    run_blocks([block])


@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: b.name)
def test_python_block_runs_where_float64_is_the_default(block):
    with jax.enable_x64(True):
        run_blocks([block])


def test_the_three_kinds_of_user_have_a_block():
    assert len(BLOCKS) >= 3


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z]+):", makefile, re.M))
    shown = set(re.findall(r"\bmake ([a-z]+)", " ".join(re.findall(r"`([^`\n]+)`", TEXT))))
    assert {"demo", "test"} <= shown
    assert shown <= targets


def test_extras_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    shown = {e for extras in re.findall(r"'\.\[([\w,]+)\]'", TEXT) for e in extras.split(",")}
    assert shown
    assert shown <= set(project["optional-dependencies"])


def test_named_files_exist():
    paths = re.findall(r"\]\(([^)#:]+)\)", TEXT) + re.findall(r"\bpython (\S+\.py)\b", TEXT)
    assert paths
    for path in paths:
        assert (ROOT / path).exists(), path


def test_anchors_exist():
    headings = {
        re.sub(r"[^a-z0-9 -]", "", h.lower()).replace(" ", "-")
        for h in re.findall(r"^#+ (.+)$", README, re.M)
    }
    for anchor in re.findall(r"\]\(#([^)]+)\)", README):
        assert anchor in headings, anchor


def test_named_functions_exist():
    names = set(re.findall(r"\brs\.(\w+)", README))
    assert names
    for name in names:
        assert hasattr(rs, name), name


@pytest.mark.parametrize(
    ("layer", "spec"),
    [
        ("Mamba-2", rs.ReplaySpec.mamba2(num_heads=128, head_dim=64, state_dim=128, num_groups=8)),
        (
            "GDN",
            rs.ReplaySpec.gated_delta_net(
                num_value_heads=32, num_key_heads=16, key_dim=128, value_dim=128
            ),
        ),
        ("KDA", rs.ReplaySpec.kda(num_heads=32, key_dim=128, value_dim=128)),
    ],
)
def test_memory_table(layer, spec):
    state = jax.eval_shape(lambda: rs.init_state(spec, 1))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.checkpoint))
    ring = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.buffer))
    record = ring / spec.capacity
    window = spec.window
    # A step reads the records before it and writes its own; a flush reads the whole window again.
    read = sum(range(1, window + 1)) / window + 1
    moved = 1 + 2 / window + (read + 1) * record / size
    (row,) = re.findall(rf"^\| {layer}, .* MB .*$", README, re.M)
    assert [cell.strip() for cell in row.split("|")[2:-1]] == [
        f"{size / 1e6:.2f} MB",
        f"{ring / 1e6:.2f} MB",
        f"{ring / size:.0%}",
        f"{moved:.2f}",
    ]


def test_shared_pointer_under_vmap():
    """`in_axes=rs.ReplayState(checkpoint=0, buffer=0, pointer=None)`, as README says."""
    spec = rs.ReplaySpec.mamba2(num_heads=2, head_dim=4, state_dim=8)
    axes = rs.ReplayState(checkpoint=0, buffer=0, pointer=None)
    bf16 = jnp.bfloat16
    inputs = rs.TokenInputs.mamba2(
        x=jnp.ones((1, 1, 2, 4), bf16),
        dt=jnp.zeros((1, 1, 2)),
        B=jnp.ones((1, 1, 1, 8), bf16),
        C=jnp.ones((1, 1, 1, 8), bf16),
        A_log=jnp.zeros(2),
    )
    state = rs.init_state(spec, 1)
    states, inputs = jax.tree.map(lambda x: jnp.stack([x] * 3), (state, inputs))
    states = rs.ReplayState(states.checkpoint, states.buffer, state.pointer)

    def step(state, inputs):
        return rs.step(spec, state, inputs)

    o, states = jax.vmap(step, in_axes=(axes, 0), out_axes=(0, axes))(states, inputs)
    assert o.shape == (3, 1, 1, 2, 4)
    assert states.pointer.length.shape == ()
