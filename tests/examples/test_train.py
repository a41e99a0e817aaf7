from pathlib import Path

import jax
import numpy as np
import pytest

import llama

pytest.importorskip("optax")
pytest.importorskip("rich")

import train
from xform.sharding import make_mesh
from xform.train.data import NO_LABEL, encode, pack

TINY = train.Config(
    model=llama.Config(layers=2, width=32, heads=8, kv_heads=4, head_size=8, hidden=64),
    steps=50,
    batch=8,
    length=48,
    learning_rate=1e-2,
)


def mesh_of(dp: int, tp: int):
    return make_mesh(dp=dp, tp=tp, devices=jax.devices("cpu")[: dp * tp])


def some_documents() -> list[np.ndarray]:
    """The functions of two files, which are much shorter than a row or much longer."""
    text = Path(llama.__file__).read_text() + Path(train.__file__).read_text()
    return [encode(part) for part in text.split("\n\n\n")]


def losses_on(dp: int, tp: int) -> np.ndarray:
    rows = pack(some_documents(), TINY.length)
    return np.array([loss for _, loss in train.training(TINY, mesh_of(dp, tp), rows)])


@pytest.fixture(scope="module")
def one_device() -> np.ndarray:
    return losses_on(1, 1)


def test_it_learns(one_device):
    assert one_device[0] == pytest.approx(np.log(256), abs=0.5)
    assert one_device[-1] < 3.2


@pytest.mark.parametrize("layout", [(8, 1), (4, 2), (2, 4)], ids="dp{0[0]}×tp{0[1]}".format)
def test_the_loss_curve_is_that_of_one_device(one_device, layout):
    np.testing.assert_allclose(losses_on(*layout), one_device, rtol=0, atol=1e-4)


def test_validation_is_the_mean_over_all_labels():
    documents = some_documents()[:5]
    params = llama.init(TINY.model, jax.random.key(0))
    rows = pack(documents, TINY.length)
    total, labels = jax.jit(llama.loss, static_argnums=2)(params, rows, TINY.model)
    assert labels == sum(len(d) - 1 for d in documents) == (rows.labels != NO_LABEL).sum()
    mesh = mesh_of(4, 2)
    placed = jax.device_put(params, train.shardings(mesh, llama.SPECS))
    found = train.evaluate(TINY, mesh, placed, documents)
    assert found == pytest.approx(float(total / labels), rel=1e-6)


def test_the_library_is_split_by_file():
    documents, held_out = train.standard_library()
    assert len(held_out) >= 5
    assert len(documents) >= 100
    assert not {d.tobytes() for d in documents} & {d.tobytes() for d in held_out}


def test_a_model_that_does_not_divide_is_refused():
    config = train.Config(model=llama.Config(heads=6, kv_heads=2), tp=4)
    with pytest.raises(ValueError, match=r"heads=6 is not a multiple of tp=4, kv_heads=2 is not"):
        train.mesh_for(config)
    with pytest.raises(ValueError, match=r"dp=3 × tp=2, which takes 6 devices"):
        train.mesh_for(train.Config(dp=3))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("    return x + 1", None),
        ("def f(x):", None),
        ("# it's fine", None),
        ("print('a", "unterminated string"),
        ("f(x", "EOF in multi-line statement"),
        ('    """Return x', "EOF in multi-line string"),
        ("f('x", "unterminated string"),
        ("x = 0b12", "invalid"),
    ],
)
def test_lines_are_judged_by_the_tokenizer(line, said):
    found = train.complaint(line)
    assert found is None if said is None else said in str(found)


def test_main_prints_what_the_readme_promises(capsys):
    tiny = {"model": TINY.model, "steps": 4, "batch": 8, "length": 64, "prompt": "def f(x):\n"}
    train.main(train.Config(**tiny))
    out = capsys.readouterr().out
    for words in ("parameters", "tokens/s", "MFU", "validation loss", "lines pass `tokenize`"):
        assert words in out
