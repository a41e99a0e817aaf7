import csv
import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sharding.pipeline.tables import random_table, spelled_out
from xform.sharding.pipeline import BUILDERS, Action, Schedule, build, dualpipe_v, one_f_one_b

# Plain values: what is drawn must not depend on the checks of types, which sample at random.
numbers = st.integers(0, 300)
action = st.tuples(st.sampled_from("FBIW"), numbers, numbers)
message = st.tuples(st.sampled_from(["SEND_F", "RECV_F", "SEND_B", "RECV_B"]), numbers, numbers)
cell = st.one_of(message.map(lambda a: [a]), st.lists(action, min_size=1, max_size=3))
tables = st.lists(st.lists(cell, max_size=6), min_size=1, max_size=4)


def made(table: list) -> Schedule:
    return Schedule([[[Action(*a) for a in cell] for cell in row] for row in table])


@given(tables)
def test_text_and_csv_read_back_what_they_wrote(table):
    schedule = made(table)
    assert Schedule.from_text(str(schedule)) == schedule
    assert Schedule.from_csv(schedule.to_csv()) == schedule
    assert hash(Schedule.from_text(str(schedule))) == hash(schedule)


@given(st.integers(0, 10**6))
def test_legal_tables_too_and_their_messages(seed):
    schedule = random_table(seed)
    out = spelled_out(schedule)
    assert Schedule.from_text(str(schedule)) == Schedule.from_csv(schedule.to_csv()) == schedule
    assert Schedule.from_csv(out.to_csv()) == out
    assert out.without_messages() == schedule


@given(tables)
def test_files(tmp_path_factory, table):
    schedule = made(table)
    folder = tmp_path_factory.mktemp("tables")
    for name in ("mine.csv", "mine.txt"):
        schedule.save(folder / name)
        assert Schedule.load(folder / name) == schedule
        assert Schedule.load(folder / name).name == "mine"


def test_a_table_of_torch_loads():
    """As torch's own `_dump_csv` writes: idle steps empty, pairs in quotes only where need be."""
    text = (
        "0F0,0F1,,,0B0,,0B1\r\n"
        ",1F0,1F1,1B0,,(1F2;1B1)OVERLAP_F_B\r\n"
        "1UNSHARD,2RECV_F0,2F0,2SEND_B0,2RESHARD,2REDUCE_GRAD,\r\n"
    )
    ignore = ["UNSHARD", "RESHARD", "REDUCE_GRAD"]
    schedule = Schedule.from_csv(text, ignore=ignore)
    assert str(schedule).splitlines() == [
        "0F0 0F1 0B0 0B1",
        "1F0 1F1 1B0 1F2+1B1",
        "2RECV_F0 2F0 2SEND_B0",
    ] or str(schedule).splitlines() == ["F0 F1 B0 B1", "F0 F1 B0 F2+B1", "RECV_F0 F0 SEND_B0"]
    with pytest.raises(ValueError, match=r"row 2, column 0: `1UNSHARD` steers .*`ignore=\[\"UNSH"):
        Schedule.from_csv(text)
    with pytest.raises(ValueError, match=r"only UNSHARD, RESHARD, REDUCE_GRAD can be left out"):
        Schedule.from_csv(text, ignore=["F"])


def as_torch_reads(text: str) -> list[list[list[tuple[str, int, int]]]]:
    """The layout by its documentation: a row a rank, a cell a step, empty where idle."""
    action = re.compile(r"(\d+)(F|I|B|W|UNSHARD|RESHARD|REDUCE_GRAD|(?:SEND|RECV)_[FB])(\d*)")

    def cell(entry: str) -> list[tuple[str, int, int]]:
        if not entry:
            return []
        pair = re.fullmatch(r"\((.*);(.*)\)OVERLAP_F_B", entry)
        parts = pair.groups() if pair else [entry]
        found = [action.fullmatch(part) for part in parts]
        return [(m[2], int(m[1]), int(m[3])) for m in found]

    return [[cell(entry) for entry in row] for row in csv.reader(io.StringIO(text))]


@pytest.mark.parametrize("name", BUILDERS)
def test_torch_reads_what_we_write(name):
    for schedule in (build(name, 4, 5), spelled_out(build(name, 4, 5))):
        read = as_torch_reads(schedule.to_csv())
        assert read == [[[tuple(a) for a in cell] for cell in row] for row in schedule.rows]
    assert as_torch_reads(Schedule([[], ["F0"]]).to_csv()) == [[[]], [[("F", 1, 0)]]]


def test_text_forms():
    short = Schedule.from_text("F0 . F1 B0 B1 # first\n\n# none\nF0 B0 F1 B1")
    assert short == Schedule.from_text("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
    assert short == Schedule(
        [[Action("F", 0, 0), "F1", "B0", ("B1",)], ["F0", "B0", "", "F1", "B1"]]
    )
    assert str(short) == "F0 F1 B0 B1\nF0 B0 F1 B1"
    assert str(Schedule([["1F0"], ["0F0"]])) == "1F0\n0F0"
    assert "(0F7;7B3)OVERLAP_F_B" in dualpipe_v(4, 8).to_csv()
    assert str(Schedule([[], ["F0"]])) == ".\nF0"


def test_what_a_table_says():
    schedule = Schedule.from_text("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0")
    assert (schedule.ranks, schedule.stages, schedule.microbatches) == (2, 4, 1)
    assert schedule.rank_of == (0, 1, 1, 0)
    assert schedule.stages_of == ((0, 3), (1, 2))
    assert Schedule([["5F0"]]).rank_of == (-1, -1, -1, -1, -1, 0)
    assert Schedule([]).stages == Schedule([[]]).microbatches == 0


def test_what_is_no_action_is_named_with_its_place():
    with pytest.raises(ValueError, match=r"rank 0, step 1: `X1` .*; rank 1, step 0: `3`") as error:
        Schedule([["F0", "X1"], [3]])
    assert "write `2F0`" in str(error.value)
    with pytest.raises(ValueError, match=r"row 1, column 2: `1F-1`"):
        Schedule.from_csv("0F0,0B0\n1F0,,1F-1")
    with pytest.raises(ValueError, match="and 5 more"):
        Schedule([["?"] * 15])
    for wrong in (Action("X", 0, 1), Action("F", -1, 0), Action("F", 0, -1)):
        with pytest.raises(ValueError, match=rf"rank 0, step 1: `Action\(kind='{wrong.kind}'"):
            Schedule([["F0", wrong]])


def test_show_is_the_simulators():
    assert one_f_one_b(2, 2).show(lockstep=True).lockstep
