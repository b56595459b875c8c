"""`zckpt diff`, `zckpt verify --against`, and `zckpt inspect` of a ZeRO folder."""

import json
import math
import sys

import pytest
import torch
from safetensors.torch import save_file

import zckpt
from zckpt.cli import main

LLAMA = "z3-w2-llama-tied-fp16-0198"


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch):
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "ZCKPT_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def run(capfd):
    """Run a command line; what it exited with, and what was written to either stream."""

    def call(*arguments):
        with pytest.raises(SystemExit) as exit_:
            main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        assert "\x1b" not in out + err
        return exit_.value.code, out, err

    return call


@pytest.fixture
def put(tmp_path):
    def write(name, **tensors):
        apart = {key: value.clone() for key, value in tensors.items()}
        save_file(apart, tmp_path / f"{name}.safetensors")
        return tmp_path / f"{name}.safetensors"

    return write


@pytest.fixture
def two(put):
    """Two files with every outcome between them."""
    values = torch.tensor([1.0, 2.0, 3.0])
    near = torch.tensor([1.0, 2.5, 3.0])
    one = put(
        "one", same=values, moved=values, shape=values, kind=values, a_only=values, nan=values
    )
    other = put(
        "other",
        same=values,
        moved=near,
        shape=torch.ones(3, 1),
        kind=values.bfloat16(),
        b_only=values,
        nan=torch.tensor([1.0, 2.0, math.nan]),
    )
    return one, other


def cells(out):
    """The table's rows, as lists of cells."""
    rows = [line.strip() for line in out.splitlines()]
    return [[cell.strip() for cell in row.split("   ") if cell.strip()] for row in rows if row]


# ------------------------------------------------------------------ diff


def test_what_is_the_same_is_one_line(run, put):
    one, other = put("one", x=torch.ones(3)), put("other", x=torch.ones(3))
    code, out, err = run("diff", one, other)
    assert (code, err) == (0, "")
    assert out == f"same: {one} and {other}: 1 name: 1 equal (1 pair of tensors, 24 bytes read)\n"


def test_every_difference_is_a_row(run, two):
    code, out, err = run("diff", *two)
    assert (code, err) == (1, "")
    rows = {row[1]: row for row in cells(out)[2:-1]}
    assert rows == {
        "moved": ["differs", "moved", "[3] float32", "1 of 3", "0.5", "0.2"],
        "shape": ["shape", "shape", "[3] -> [3, 1] float32"],
        "kind": ["dtype", "kind", "[3] float32 -> bfloat16", "0 of 3", "0", "0"],
        "nan": ["differs", "nan", "[3] float32", "1 of 3", "inf", "inf"],
        "a_only": ["only in A", "a_only", "[3] float32"],
        "b_only": ["only in B", "b_only", "[3] float32"],
    }
    summary = out.splitlines()[-1]
    assert summary.startswith(f"differs: {two[0]} and {two[1]}: 7 names: 2 with other values, ")
    assert "1 equal" in summary


def test_all_shows_the_equal_ones_too(run, two):
    out = run("diff", *two, "--all")[1]
    assert ["equal", "same", "[3] float32", "0 of 3", "0", "0"] in cells(out)


def test_json_is_one_document_without_infinities(run, two):
    code, out, err = run("diff", *two, "--json")
    document = json.loads(out, parse_constant=pytest.fail)
    rows = {row["name"]: row for row in document["rows"]}
    assert (code, err) == (1, "")
    assert document["is_same"] is False
    assert document["counts"] == {
        "equal": 1,
        "differs": 2,
        "shape": 1,
        "dtype": 1,
        "only in A": 1,
        "only in B": 1,
    }
    assert "same" not in rows
    assert rows["moved"] == {
        "name": "moved",
        "outcome": "differs",
        "a": {"stored_as": "moved", "shape": [3], "dtype": "float32"},
        "b": {"stored_as": "moved", "shape": [3], "dtype": "float32"},
        "differing_numel": 1,
        "max_abs": 0.5,
        "max_rel": 0.2,
    }
    assert (rows["nan"]["max_abs"], rows["nan"]["max_rel"]) == ("inf", "inf")
    assert (rows["a_only"]["b"], rows["a_only"]["max_abs"]) == (None, None)
    document = json.loads(run("diff", *two, "--json", "--all")[1])
    assert len(document["rows"]) == 7


@pytest.mark.parametrize(
    "options, code, word",
    [
        (["--include", "same"], 0, "1 equal"),
        (["--include", "same", "--include", "moved"], 1, "1 with other values"),
        (["--include", "moved", "--rtol", "0.2"], 0, "1 within the tolerance"),
        (["--include", "moved", "--atol", "0.5"], 0, "1 within the tolerance"),
        (["--include", "moved", "--rtol", "0.1"], 1, "1 with other values"),
        (["--include", "kind", "--rtol", "1"], 1, "1 of another dtype"),
        (["--exclude", "[!s]*", "--exclude", "shape"], 0, "1 name: 1 equal"),
    ],
)
def test_options_choose_and_accept(run, two, options, code, word):
    found, out, _ = run("diff", *two, *options)
    assert found == code
    assert word in out.splitlines()[-1]


@pytest.mark.parametrize(
    "options", [["--rtol", "-1"], ["--atol", "nan"], ["--include", "nothing"], ["--tag", "x"]]
)
def test_bad_options_are_usage_errors(run, two, options):
    code, out, _ = run("diff", *two, *options)
    assert (code, out) == (2, "")


def test_what_cannot_be_read_is_told_apart_from_a_difference(run, two, tmp_path):
    code, out, err = run("diff", two[0], tmp_path / "nothing")
    assert (code, out) == (3, "")
    assert "no such file or folder" in err
    two[1].write_bytes(two[1].read_bytes()[:-1])
    assert run("diff", *two)[0] == 3


def test_a_zero_folder_can_be_either_side(run, zero_folder, tmp_path):
    folder = zero_folder(LLAMA)
    (tmp_path / "masters").mkdir()
    masters = {name: tensor.clone() for name, tensor in folder.expected.items()}
    save_file(masters, tmp_path / "masters" / "model.safetensors")
    for pair in ((folder.ckpt, tmp_path / "masters"), (tmp_path / "masters", folder.ckpt)):
        code, out, err = run("diff", *pair)
        assert code == 0
        assert out.startswith("same: ")
        assert err.startswith("note: ")
        assert "one tensor in" in err
        assert run("diff", *pair, "--quiet") == (0, out, "")
    assert run("diff", folder.ckpt, folder.ckpt, "--tag-a", "global_step3")[0] == 0
    assert run("diff", folder.ckpt, folder.ckpt, "--tag-b", "global_step9")[0] == 3


# ------------------------------------------------------------------ verify --against


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    zckpt.save_consolidated(model, tmp_path / "saved", dtype="bf16")
    return tmp_path / "saved", {name: t.detach().clone() for name, t in model.state_dict().items()}


def test_verify_against_says_what_it_compared(run, saved, put):
    folder, tensors = saved
    source = put("source", **tensors)
    code, out, err = run("verify", folder, "--against", source)
    checked, verdict = out.splitlines()
    assert code == 0
    assert checked.startswith(
        # 8 values in bf16, twice, and in fp32
        f"1 file compared, 2 tensors hashed, 2 tensors compared with {source}, 64 bytes in "
    )
    assert verdict == f"fine: {folder}: all that was compared agrees"
    assert err == "note: 2 tensors compared with SRC's float32 values cast to bfloat16\n"
    document = json.loads(run("verify", folder, "--against", source, "--json")[1])
    assert document["against"] == str(source)
    assert (document["tensors_compared"], document["bytes_compared"]) == (2, 48)


def test_verify_against_other_values_differs(run, saved, put):
    folder, tensors = saved
    source = put("source", **(tensors | {"bias": tensors["bias"] * 2}))
    code, out, _ = run("verify", folder, "--against", source, "--quiet")
    assert code == 1
    (row,) = (line for line in out.splitlines() if " bias " in line)
    assert "2 of 2 elements are not those of SRC cast to bfloat16" in row
    assert out.splitlines()[-1] == f"differs: {folder}: 1 finding"


def test_verify_against_without_a_manifest(run, saved, put):
    _, tensors = saved
    out_file, source = put("out", **tensors), put("source", **tensors)
    code, out, _ = run("verify", out_file, "--against", source)
    assert code == 0
    assert out.startswith(f"1 file compared, 2 tensors compared with {source}, 64 bytes in ")
    assert out.endswith("all that was compared agrees\n")


def test_verify_against_a_zero_folder(run, zero_folder, tmp_path):
    folder = zero_folder(LLAMA)
    (tmp_path / "live").mkdir()
    live = {name: tensor.clone() for name, tensor in folder.live.items()}
    save_file(live, tmp_path / "live" / "model.safetensors")
    options = ("verify", tmp_path / "live", "--against", folder.ckpt)
    assert run(*options)[0] == 0
    assert run(*options, "--tag", "global_step3")[0] == 0
    assert run(*options, "--tag", "global_step9")[0] == 3


@pytest.mark.parametrize("options", [["--tag", "x"], ["--against", "x", "--headers-only"]])
def test_verify_refuses_what_does_not_go_together(run, saved, options):
    assert run("verify", saved[0], *options)[0] == 2


# ------------------------------------------------------------------ inspect


def test_inspect_shows_a_zero_folder(run, zero_folder):
    folder = zero_folder(LLAMA).ckpt
    code, out, err = run("inspect", folder)
    lines = [line.lstrip("│├└─ ") for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert lines[0].startswith("ZeRO stage 3 folder")
    assert lines[0].endswith(f" {folder / 'global_step3'}")
    assert [
        line.split() for line in lines if line.startswith(("tag", "step", "ranks", "deep"))
    ] == [
        ["tag", "global_step3"],
        ["step", "3"],
        ["ranks", "2"],
        ["deepspeed", "0.19.8"],
    ]
    assert "embed_tokens.weight  [101, 16] float32  6.5 kB" in lines
    assert "lm_head.weight  -> model.embed_tokens.weight" in lines
    assert run("inspect", folder, "--tag", "global_step3") == (0, out, "")
    assert run("inspect", folder, "--tag", "global_step9")[0] == 3


def test_inspect_json_has_the_facts_of_a_zero_folder(run, zero_folder):
    folder = zero_folder(LLAMA)
    document = json.loads(run("inspect", folder.ckpt, "--json")[1])
    assert document["facts"] == {
        "tag": "global_step3",
        "step": "3",
        "ranks": "2",
        "deepspeed": "0.19.8",
    }
    assert document["notes"] == []
    assert document["manifest"] is None
    named = {t["name"] for t in document["tensors"]} | set(document["aliases"])
    assert named == set(folder.expected)


def test_inspect_passes_on_what_deserves_a_look(run, zero_folder):
    code, _, err = run("inspect", zero_folder("z3-w2-frozen-bf16-083").ckpt)
    assert code == 0
    assert "parameters are not in it" in err
    assert "no manifest" not in err
