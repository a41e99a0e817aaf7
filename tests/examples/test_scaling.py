"""benchmarks/scaling_gpu.py in small: its layouts, its parity, and what it says at the end."""

import dataclasses
import json
import math
import sys

import jax
import numpy as np
import pytest

pytest.importorskip("optax")

import pipelined
from benchmarks import scaling_gpu
from benchmarks.layouts import predicted
from benchmarks.scaling_gpu import LAYOUTS, MODELS, SMALL, TARGETS, Case, Run, row_of

# Of steps, one row of each kind; of the rest all.
SOME = {"train": ("--rows", "bf16 fsdp=8,fp8 tp=8 ring,bf16 pp=2 cp=2 tp=2")}
EVERY = [(n, name) for n, names in LAYOUTS.items() for name in names]


@pytest.mark.parametrize(("devices", "name"), EVERY, ids=lambda x: str(x))
def test_every_layout_takes_its_devices_and_runs_every_model(devices, name):
    row = row_of(name)
    assert row.devices == devices
    for model, length in [(SMALL, 128), *((model, 8192) for model in MODELS.values())]:
        pipelined.check(row.layout, model, row.mesh(), row.rows, length, row.schedule)
    assert predicted(row, MODELS["8B"], 8192).seconds > 0


def test_a_layout_is_what_its_name_says():
    row = row_of("fsdp=2 tp=4 ring")
    assert row.axes == {"dp": 2, "tp": 4}
    assert (row.layout.fsdp, row.layout.sequence, row.layout.overlap) == (True, True, "ring")
    assert row.rows == 8
    row = row_of("pp=4 cp=2 one-program")
    assert (row.axes, row.rows) == ({"dp": 1, "pp": 4, "cp": 2, "tp": 1}, 16)
    assert row.one_program
    assert not row_of("pp=4").one_program


def test_every_target_is_of_rows_that_four_or_eight_gpus_run_first(command, monkeypatch):
    given, wanted = command("--only", "train"), {name for t in TARGETS for name in t[2:]}
    met = set()
    for count in (4, 8):
        monkeypatch.setattr(scaling_gpu, "usable", lambda count=count: count)
        names = [case.name for case in scaling_gpu.cases(given)]
        assert len(names) == len(set(names))
        first = wanted & set(names)
        assert first == set(names[: len(first)])
        met |= first
    assert met == wanted


def test_eight_billion_parameters_do_not_fit_one_gpu_and_are_left_out(capsys):
    case = Case("8B bf16 fsdp=1", MODELS["8B"], 8192, "bf16", row_of("fsdp=1"))
    less = dataclasses.replace(case, name="1B fp8 fsdp=1", model=MODELS["1B"], policy="fp8")
    assert scaling_gpu.fitting([case, less]) == [less]
    large, small = capsys.readouterr().out.splitlines()[-2:]
    assert "left out: a program may have 123.4 GiB" in large
    assert "left out" not in small
    assert small.count("–") == 3  # the planner knows no time of 8 bits


def test_the_command_holds_layouts_to_one_device(command, capsys, tmp_path):
    file = tmp_path / "found.json"
    command("--rows", "fsdp=8", "--json", str(file))
    with pytest.raises(SystemExit) as done:
        scaling_gpu.main()
    assert done.value.code == 0
    said, found = capsys.readouterr().out, json.loads(file.read_text())["parity"]
    assert [row["name"] for row in found] == ["fsdp=8"]
    for row in found:
        assert 0 < row["gradients"] < 1e-12
        assert f"{row['name']:44}" in said


def test_a_gradient_that_is_off_or_missing_is_named_and_the_command_fails(
    command, capsys, monkeypatch
):
    right = {"layers": {"down": np.arange(1.0, 4.0)}, "norm": np.ones(2)}
    wrong = {"layers": {"down": 2 * right["layers"]["down"]}, "norm": np.ones(2)}
    assert scaling_gpu.worst_of((np.float64(1), wrong), (np.float64(1), right)) == (
        0.0, 1.0, "layers/down",
    )  # fmt: skip
    lost = {**right, "norm": np.full(2, np.nan)}
    assert scaling_gpu.worst_of((np.float64(1), lost), (np.float64(1), right))[1:] == (
        math.inf, "norm",
    )  # fmt: skip
    monkeypatch.setattr(scaling_gpu, "gradients_at_rest", lambda *_: (np.float64(1), wrong))
    monkeypatch.setattr(scaling_gpu, "on_one", lambda *_: (np.float64(1), right))
    command("--rows", "pp=8 one-program")
    with pytest.raises(SystemExit) as done:
        scaling_gpu.main()
    assert done.value.code == 1
    assert "layers/down, WRONG: above 1e-09" in capsys.readouterr().out


def test_a_row_that_fails_is_a_finding_and_late_ones_are_named(command, capsys, monkeypatch):
    def fails(row):
        raise ValueError(f"no {row.name} today")

    run = Run(math.inf)
    run.each("parity", [row_of("dp=2"), row_of("tp=2")], fails)
    assert [row["error"] for row in run.found["parity"]] == [
        "ValueError: no dp=2 today", "ValueError: no tp=2 today",
    ]  # fmt: skip
    Run(-1.0).each("parity", [row_of("cp=2")], fails)
    assert "no time left for: cp=2" in capsys.readouterr().out
    monkeypatch.setattr(scaling_gpu, "parity", fails)
    command("--rows", "tp=8 ring")
    with pytest.raises(SystemExit) as done:
        scaling_gpu.main()
    assert done.value.code == 1


def test_targets_say_what_holds_what_is_missed_and_what_was_not_run(capsys):
    rate = lambda name, n: dict(name=name, tokens_per_second=n)
    failed = dict(name="8B bf16 fsdp=2 tp=4", error="no")
    scaling_gpu.targets(
        [rate("8B bf16 fsdp=8", 9_600.0), rate("8B fp8 fsdp=8", 13_499.0),
         rate("1B bf16 fsdp=8", 95.0), rate("1B bf16 fsdp=1", 100.0), failed]
    )  # fmt: skip
    lines = capsys.readouterr().out.splitlines()[-6:]
    assert [line.split()[-2:] for line in lines] == [
        ["9,600", "holds"], ["13,499", "missed"], ["0.95", "holds"],
        *[["not", "run"]] * 3,
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("part", ["parity", "train", "schedules", "context"])
def test_all_of_the_command_runs_in_small(command, capsys, part):
    command(
        "--tiny", "--only", part, "--steps", "1", *(["--rows", "fsdp"] if part == "train" else [])
    )
    with pytest.raises(SystemExit) as done:
        scaling_gpu.main()
    assert done.value.code == 0, capsys.readouterr().out


@pytest.fixture
def command(monkeypatch):
    """What the command is given, on the eight devices of the tests."""

    def given(*words: str):
        monkeypatch.setattr(sys, "argv", ["scaling_gpu.py", *words])
        return scaling_gpu.asked_for()

    assert jax.device_count() == 8
    return given
