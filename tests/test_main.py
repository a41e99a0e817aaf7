"""The self-check passes where things work, and fails where they do not."""

import jax.numpy as jnp
import pytest

import xform.__main__ as report


@pytest.mark.slow
def test_every_check_passes(capsys):
    assert report.main() == 0
    out = capsys.readouterr().out
    assert "xform-jax" in out
    assert "jax 0." in out
    assert "cpu: 8 × cpu" in out
    assert out.count("  pass  ") == len(report.CHECKS)
    assert out.endswith("all checks pass\n")


def test_wrong_attention_is_noticed(monkeypatch, capsys):
    right = report.flex_attention

    def wrong(*args, implementation, **options):
        out = right(*args, implementation=implementation, **options)
        return out if implementation else out * 1.05

    def raises():
        raise RuntimeError("no such device")

    attend = lambda *args: report._attend(*args)  # which JAX has not traced before
    bfloat16 = lambda: report._against_float64(attend, jnp.bfloat16)
    checks = {"bfloat16": bfloat16, "sum": report._summed, "device": raises}
    monkeypatch.setattr(report, "flex_attention", wrong)
    monkeypatch.setattr(report, "CHECKS", checks)
    assert report.main() == 2
    out = capsys.readouterr().out
    assert "FAIL  AssertionError: off by" in out
    assert "pass  over 8 devices" in out
    assert "FAIL  RuntimeError: no such device" in out
    assert out.endswith("2 of 3 checks FAIL\n")
