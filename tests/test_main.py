"""The self-check passes where things work, and fails where they do not."""

import os
import subprocess
import sys

import jax
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


def test_without_devices_it_says_why_and_how_to_go_on():
    """As where JAX is told to use a GPU that is not there."""
    environment = {**os.environ, "JAX_PLATFORMS": "none_such"}
    command = [sys.executable, "-m", "xform"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    versions, python, *words = done.stdout.splitlines()
    assert versions.startswith("xform-jax ")
    assert python.startswith("python 3.")
    assert words[0].startswith("no devices: RuntimeError: Unable to initialize backend 'none_such'")
    assert words[1].startswith("to go on: JAX_PLATFORMS=none_such asks for it: unset that, or try")
    assert words[2:] == ["no check could run"]
    assert done.stderr == ""
    assert done.returncode == 1


def test_a_platform_that_can_not_be_used_is_a_line_of_the_report(monkeypatch, capsys):
    """JAX logs it with a traceback, and goes on, or raises without a word."""

    def log_and(then):
        def devices():
            try:
                raise RuntimeError("Unable to load cuDNN.\nIs it installed?")
            except RuntimeError:
                report.platform_log.exception("no plugin %s", "xla_cuda13")
            return then()

        return devices

    def nothing():
        raise AssertionError

    found = jax.devices
    monkeypatch.setattr(report, "CHECKS", {"one": lambda: "fine"})
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(jax, "devices", log_and(nothing))
    assert report.main() == 1
    why = "no plugin xla_cuda13: RuntimeError: Unable to load cuDNN. Is it installed?"
    out, err = capsys.readouterr()
    assert f"\nno devices: {why}; AssertionError\nto go on: install the JAX of this" in out
    monkeypatch.setattr(jax, "devices", log_and(found))
    assert report.main() == 0
    out, more = capsys.readouterr()
    assert f"\nnot used: {why}\ncpu: 8 × cpu\none" in out
    assert err == more == ""
