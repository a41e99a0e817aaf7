"""What a layout means, in records and in words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.sharding.equal import mesh_of
from xform.sharding import describe, shardings

PARAMS = {
    "table": jnp.zeros((16, 8)),
    "layers": {"norm": jnp.zeros((2, 8)), "scale": jnp.zeros((2, 4)), "up": jnp.zeros((2, 8, 16))},
}
TP = {"table": P("tp"), "layers": {"norm": P(), "scale": P(), "up": P(None, None, "tp")}}
FSDP = {
    "table": P(("tp", "dp")),
    "layers": {"norm": P(None, "dp"), "scale": P(), "up": P(None, "dp", "tp")},
}


def summed(description):
    return {x.path.rsplit("['")[-1][:-2]: x.summed for x in description.tensors}


def test_gradients_are_summed_over_what_splits_the_work_and_not_the_tensor():
    mesh = mesh_of(dp=4, tp=2)
    plain = describe(mesh, PARAMS, TP, rows=(8, 6), inside=["scale"])
    assert summed(plain) == {
        "table": ("dp",), "norm": ("dp",), "scale": ("dp", "tp"), "up": ("dp",),
    }  # fmt: skip
    sequence = describe(mesh, PARAMS, TP, rows=(8, 6), stream=P("dp", "tp"))
    assert summed(sequence) == {
        "table": ("dp",), "norm": ("dp", "tp"), "scale": ("dp", "tp"), "up": ("dp",),
    }  # fmt: skip
    fsdp = describe(mesh, PARAMS, FSDP, rows=(8, 6))
    assert summed(fsdp)["up"] == ("dp",)
    dealt_out = {x.path: x.dealt_out for x in fsdp.tensors}
    assert dealt_out["['layers']['scale']"] == ()
    assert set(dealt_out.values()) == {(), ("dp",)}


def test_context_and_pipeline_axes_count():
    """Parameters are summed over `cp`, which splits positions; a table on every stage over `pp`."""
    mesh = mesh_of(dp=2, pp=2, cp=2)
    specs = {"table": P(("dp", "cp")), "layers": {"norm": P("pp"), "scale": P("pp"), "up": P("pp")}}
    found = describe(mesh, PARAMS, specs, rows=(8, 6), tokens=P("dp", "cp"))
    assert summed(found)["table"] == ("dp", "pp", "cp")
    assert summed(found)["up"] == ("dp", "cp")
    table = next(x for x in found.tensors if "table" in x.path)
    assert table.dealt_out == ("dp", "cp")
    assert [(r.at, r.rows, r.positions, r.devices) for r in found.readers[:2]] == [
        ({"dp": 0, "cp": 0}, (0, 4), (0, 3), (0, 2)),
        ({"dp": 0, "cp": 1}, (0, 4), (3, 6), (1, 3)),
    ]


def test_bytes_and_readers_are_what_devices_have():
    mesh = mesh_of(dp=4, tp=2)
    found = describe(mesh, PARAMS, FSDP, rows=(8, 6))
    placed = jax.device_put(PARAMS, shardings(mesh, FSDP))
    assert found.bytes == sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(placed))
    at = shardings(mesh, P("dp")).devices_indices_map((8, 6))
    read = {device.id: index[0] for device, index in at.items()}
    for reader in found.readers:
        for device in reader.devices:
            assert (read[device].start, read[device].stop) == reader.rows
    assert sorted(i for r in found.readers for i in r.devices) == list(range(8))


def test_all_that_does_not_divide_is_listed():
    mesh = mesh_of(dp=4, tp=2)
    specs = {**TP, "layers": {**TP["layers"], "scale": P("dp"), "norm": P("ep")}}
    with pytest.raises(ValueError, match=r"`describe` on the mesh dp=4 × tp=2: ") as error:
        describe(mesh, PARAMS, specs, rows=(6, 6))
    for words in (
        "['layers']['scale'] (2, 4) is split into (4, 1) parts, which don't divide it",
        "['layers']['norm'] (2, 8) is split over ['ep'], which it or the mesh lacks",
        "a batch of rows (6, 6) is split into (4, 1) parts",
    ):
        assert words in str(error.value)


def test_large_meshes_are_said_in_a_few_lines():
    """16,384 devices that need not be there."""
    mesh = jax.sharding.AbstractMesh((1024, 16), ("dp", "tp"))
    found = describe(mesh, PARAMS, TP, rows=(2048, 6))
    assert len(found.readers) == 1024
    assert found.readers[-1].devices == tuple(range(16368, 16384))
    assert "… and 1016 more" in str(found)
    assert len(str(found).splitlines()) < 20


def test_the_words_name_axes_parts_and_sums():
    text = str(describe(mesh_of(dp=4, tp=2), PARAMS, FSDP, rows=(8, 6), stream=P("dp", "tp")))
    assert "dp=4 × tp=2: 8 devices, each with 240 of 1,632 bytes of parameters" in text
    lines = [line.split("  ") for line in text.splitlines()]
    row = next(line for line in lines if any("'up'" in word for word in line))
    words = [word.strip() for word in row if word.strip()]
    assert words == [
        "['layers']['up'] float32[2, 8, 16]",
        "[2, 2, 8] by dp: dim 1, tp: dim 2",
        "dp (dealt out)",
    ]
    assert np.isin(["rows 0-1", "rows 6-7"], [w.strip() for line in lines for w in line]).all()
