"""`zckpt convert`: what it prints, what it exits with, and that nothing is left of what failed."""

import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from rich.console import Console

import zckpt
from zckpt import errors
from zckpt.cli import main, output
from zckpt.writers import stream

TIED = "z3-w2-llama-tied-fp16-0198"
UNOWNED = "z3-w2-lora-unowned-base-bf16-0189"
FROZEN = "z3-w2-frozen-tied-bf16-0198"
TRAINER = "z3-w2-hftrainer-bf16-0189"


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch):
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "ZCKPT_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)


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
def convert(run, zero_folder, tmp_path):
    """Convert a real folder to `tmp_path / "out"`."""

    def call(name, *options):
        return run("convert", zero_folder(name).ckpt, tmp_path / "out", *options)

    return call


def assert_equal(found, expected):
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


# ------------------------------------------------------------------ what it says


def test_it_says_what_it_wrote(convert, run, zero_folder, tmp_path):
    folder, out = zero_folder(TIED), tmp_path / "out"
    code, said, err = convert(TIED)
    source, tensors, aliases, seconds, written = said.splitlines()
    size_bytes = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    assert (code, err) == (0, "")
    assert source == f"from      {folder.ckpt / 'global_step3'}"
    assert tensors == f"tensors   20 tensors, {size_bytes / 1000:.1f} kB in 1 file"
    assert aliases == "aliases   1 more name: lm_head.weight -> model.embed_tokens.weight"
    assert seconds.startswith("time      0.")  # a rate of so few bytes would say nothing
    assert written == f"written: {out}"
    assert_equal(zckpt.open(out), folder.expected)
    assert run("verify", out)[0] == 0


def test_json_is_one_document(convert, zero_folder, tmp_path):
    code, said, err = convert(TRAINER, "--json", "--max-shard-size", "20KB", "--jobs", "1")
    document = json.loads(said)
    folder, out = zero_folder(TRAINER).ckpt, tmp_path / "out"
    assert code == 0
    assert document["source"] == str(folder / "global_step2")
    assert document["path"] == str(out)
    assert document["tag"] == "global_step2"
    assert document["is_dry_run"] is False
    assert document["files"] == {p.name: p.stat().st_size for p in out.glob("*.safetensors")}
    assert len(document["files"]) > 1
    assert document["tensors"] == 20
    assert document["size_bytes"] == sum(document["files"].values())
    assert document["aliases"] == {"lm_head.weight": "model.embed_tokens.weight"}
    assert document["left_out"] == []
    assert (document["jobs"], document["estimated_s"]) == (1, None)
    assert document["seconds"].keys() == {"open", "write", "commit"}
    assert document["notes"] == [f"{folder} holds config.json; --assets {folder} copies it"]
    assert err == f"note: {document['notes'][0]}\n"


def test_quiet_is_without_notes(convert):
    code, said, err = convert(TRAINER, "--quiet")
    assert (code, err) == (0, "")
    assert "written: " in said


def test_a_dry_run_says_what_would_be_written(convert, tmp_path):
    options = ("--max-shard-size", "1000", "--dry-run")
    code, said, err = convert(TIED, *options)
    assert (code, err) == (0, "")
    would = json.loads(convert(TIED, *options, "--json")[1])
    assert list(tmp_path.iterdir()) == []
    did = json.loads(convert(TIED, *options[:2], "--json")[1])
    same = ("files", "tensors", "aliases", "left_out", "read_bytes", "memory_bytes")
    assert {key: would[key] for key in same} == {key: did[key] for key in same}
    assert would["is_dry_run"] is True
    assert would["estimated_s"] >= 0
    lines = said.splitlines()
    sizes = [f"          {name}  {output.human(size)}" for name, size in did["files"].items()]
    assert len(sizes) == 15
    assert lines[2:15] == [*sizes[:12], "          and 3 more"]
    assert [line.split()[0] for line in lines[15:]] == ["aliases", "reads", "memory", "time", "dry"]
    assert lines[-1] == f"dry run: nothing was written to {tmp_path / 'out'}"


def test_large_work_has_a_rate(monkeypatch, capsys, tmp_path):
    from zckpt.cli import convert as command
    from zckpt.verbs.convert import ConvertReport

    report = ConvertReport(
        source=tmp_path,
        path=tmp_path,
        tag="t",
        files={"model.safetensors": 6_000_000_000},
        tensors=1,
        aliases={},
        left_out=(),
        read_bytes=0,
        memory_bytes=0,
        estimated_s=0.0,
        jobs=2,
        manifest=None,
        seconds={"open": 1.0, "write": 2.5, "commit": 0.5},
        notes=(),
    )
    command._print(report, is_dry=False)
    assert "time      4.00 s, 1.50 GB/s in 2 threads" in capsys.readouterr().out


def test_help_teaches(run):
    code, said, _ = run("convert", "--help")
    assert code == 0
    assert said.count(" zckpt convert ") >= 4
    assert "Exit codes: 0 fine" in said


def test_help_imports_neither_torch_nor_deepspeed():
    code = """
import sys
from zckpt.cli import main
try:
    main(["convert", "--help"])
finally:
    print({"torch", "deepspeed", "safetensors", "numpy"} & sys.modules.keys(), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "set()\n"


def test_the_bar_has_a_rate_and_the_time_left(monkeypatch):
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=120)
    monkeypatch.setattr(output, "stderr", lambda: console)
    monkeypatch.setattr(output, "_BAR_AFTER_S", 0.0)
    with output.byte_bar("converting", quiet=False) as advance:
        for done in range(1, 6):
            time.sleep(0.05)
            advance(done * 1_000_000, 100_000_000)
        time.sleep(0.15)
    assert "converting" in shown.getvalue()
    assert "/100.0 MB" in shown.getvalue()
    assert "MB/s" in shown.getvalue()
    assert "00:0" in shown.getvalue()


# ------------------------------------------------------------------ options


def test_options_reach_the_verb(run, monkeypatch):
    given = {}

    def verb(src, out, **options):
        given.update(options, src=str(src), out=str(out))
        raise errors.UsageError("seen")

    monkeypatch.setattr("zckpt.verbs.convert.convert", verb)
    assert run("convert", "a", "b")[0] == 2
    given.pop("progress")
    assert given == {
        "src": "a",
        "out": "b",
        "tag": None,
        "dtype": "keep",
        "max_shard_size": "5GB",
        "include": (),
        "exclude": (),
        "exclude_frozen": False,
        "allow_missing": (),
        "allow_global": (),
        "assets": None,
        "jobs": None,
        "digest": True,
        "overwrite": False,
        "dry_run": False,
    }
    line = (
        "convert a b --tag t --dtype bf16 --max-shard-size 1000 --include i --include j --exclude e"
        " --exclude-frozen --allow-missing m --allow-missing n --allow-global g --assets d --jobs 3"
        " --no-digest --overwrite --dry-run"
    )
    assert run(*line.split())[0] == 2
    given.pop("progress")
    assert str(given.pop("assets")) == "d"
    assert given == {
        "src": "a",
        "out": "b",
        "tag": "t",
        "dtype": "bf16",
        "max_shard_size": 1000,
        "include": ["i", "j"],
        "exclude": ["e"],
        "exclude_frozen": True,
        "allow_missing": ["m", "n"],
        "allow_global": ["g"],
        "jobs": 3,
        "digest": False,
        "overwrite": True,
        "dry_run": True,
    }


@pytest.mark.parametrize("options", [["--jobs", "0"], ["--dtype", "int8"], ["--no-such-option"]])
def test_what_typer_refuses_is_a_usage_error(convert, options, tmp_path):
    assert convert(TIED, *options)[0] == 2
    assert list(tmp_path.iterdir()) == []


def test_the_config_is_copied_and_says_the_dtype(convert, zero_folder, tmp_path):
    assets = zero_folder(TRAINER).ckpt
    code, _, err = convert(TRAINER, "--dtype", "bf16", "--assets", assets)
    assert (code, err) == (0, "")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"


def test_what_is_left_out_is_said_by_reason(convert, zero_folder, tmp_path):
    code, said, _ = convert(FROZEN, "--exclude-frozen", "--exclude", "*.bias")
    masters = zero_folder(FROZEN).masters
    assert code == 0
    assert "left out  " in said
    assert " names, not held by the optimizer: transformer.wte.weight, " in said
    assert " names, not asked for: " in said
    assert set(zckpt.open(tmp_path / "out")) == {n for n in masters if not n.endswith(".bias")}


def test_missing_parameters_can_be_done_without(convert, tmp_path):
    code, said, _ = convert(UNOWNED, "--allow-missing", "*")
    assert code == 0
    assert "left out  21 names, not in the ZeRO folder: base_model." in said
    assert len(zckpt.open(tmp_path / "out")) == 8


def test_a_checkpoint_is_replaced_on_request_only(convert, zero_folder, tmp_path):
    assert convert(TRAINER, "-q")[0] == 0
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    code, said, err = convert(TIED)
    assert (code, said) == (2, "")
    assert "next:  name another folder, or replace a checkpoint with --overwrite" in err
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    assert convert(TIED, "--overwrite")[0] == 0
    assert_equal(zckpt.open(tmp_path / "out"), zero_folder(TIED).expected)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# ------------------------------------------------------------------ what goes wrong

SAVE = "next:  save_consolidated saves them from the live model; else use the option above"
ANOTHER = "next:  take another copy, or of a ZeRO folder another --tag"

FAILURES = [
    (UNOWNED, (), 3, "--allow-missing 'base_model.model.model.embed_tokens.weight'", SAVE),
    ("z2-w2-lora-excludefrozen-bf16-0198", (), 3, "--exclude-frozen", SAVE),
    ("bad-evil-os-system-model", (), 3, "posix.system", "next:  ask who made the file"),
    ("bad-z3-bitflip-master", (), 3, "pp_rank_1_mp_rank_00_optim_states.pt", ANOTHER),
    ("bad-z3-truncated-optim", (), 3, "pp_rank_2_mp_rank_00_optim_states.pt", ANOTHER),
    ("bad-empty-tag", (), 3, "global_step3", "next:  name what the command reads"),
    ("bad-latest-missing-two-tags", (), 3, "--tag step-5", "next:  name what the command reads"),
    ("z2-w2-moe-ep2-bf16-0198", (), 2, "mixture-of-experts", "next:  the message says"),
    (TIED, ("--tag", "nonsense"), 3, "global_step3", "next:  name what the command reads"),
    (TIED, ("--max-shard-size", "huge"), 2, "max_shard_size='huge' is not a size", "--help"),
    (TIED, ("--include", "nothing*"), 2, "no tensor is left to convert", "--help"),
    (TIED, ("--jobs", "5000"), 2, "jobs=5000", "--help"),
    (TIED, ("--assets", "nowhere"), 2, "holds no config.json", "--help"),
]


@pytest.mark.parametrize("name, options, code, said, next_step", FAILURES)
def test_a_failure_is_two_lines_and_leaves_nothing(
    convert, tmp_path, *, name, options, code, said, next_step
):
    found, out, err = convert(name, *options)
    first, second = err.splitlines()
    assert (found, out) == (code, "")
    assert first.startswith("error: ")
    assert said in first
    assert second.startswith("next:  ")
    assert next_step in second
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [TIED, "bad-z3-bitflip-master"])
def test_a_failure_keeps_what_was_there(convert, monkeypatch, tmp_path, name):
    assert convert(TRAINER, "-q")[0] == 0
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    if name == TIED:
        monkeypatch.setattr(stream, "write_all", interrupt)
    assert convert(name, "--overwrite")[0] == (130 if name == TIED else 3)
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def interrupt(*_):
    raise KeyboardInterrupt


def test_an_interrupt_is_one_line(convert, monkeypatch, tmp_path):
    monkeypatch.setattr(stream, "write_all", interrupt)
    out = tmp_path / "out"
    assert convert(TIED) == (130, "", f"interrupted; nothing was left at {out}\n")
    assert list(tmp_path.iterdir()) == []
    out.mkdir()
    assert convert(TIED) == (130, "", f"interrupted; nothing changed at {out}\n")
    assert list(out.iterdir()) == []


def test_an_interrupt_after_the_rename_says_so(convert, monkeypatch, tmp_path):
    from zckpt.writers import commit

    swap_in = commit._swap_in

    def swap_in_then_stop(folder, target):
        swap_in(folder, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(commit, "_swap_in", swap_in_then_stop)
    out = tmp_path / "out"
    assert convert(TIED) == (130, "", f"interrupted when {out} was complete\n")
    assert zckpt.verify(out).is_fine


SLOW = """
import os, sys, time
import zckpt.verbs.convert
from zckpt.cli import main
from zckpt.writers import stream

write_all = stream.write_all
def slowly(*arguments):
    time.sleep(0.2)
    write_all(*arguments)
stream.write_all = slowly

folder, *places = sys.argv[1:]
children = []
for place in places:
    child = os.fork()
    if not child:
        said = os.open(place + "/said", os.O_WRONLY | os.O_CREAT)
        os.dup2(said, 1)
        os.dup2(said, 2)
        main(["convert", folder, place + "/out"])
    children.append(child)
print(*children, flush=True)
print(*(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""


def test_signals_leave_nothing_under_the_final_name(zero_folder, tmp_path):
    """One process a signal, each hit while it writes."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
    places = {number: tmp_path / number.name for number in signals}
    for place in places.values():
        place.mkdir()
    folder = zero_folder(TIED).ckpt
    line = [sys.executable, "-c", SLOW, folder, *places.values()]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as parent:
        children = map(int, parent.stdout.readline().split())
        for (number, place), child in zip(places.items(), children, strict=True):
            while not any(place.glob(".out.zckpt-staging-*/*.safetensors")):
                assert parent.poll() is None
                time.sleep(0.01)
            os.kill(child, number)
        codes = parent.stdout.readline().split()
    assert codes == ["130", "-15", "-9"]
    for number, place in places.items():
        out, said = place / "out", place / "said"
        assert not out.exists()
        if number is signal.SIGINT:
            assert said.read_text() == f"interrupted; nothing was left at {out}\n"
            assert list(place.iterdir()) == [said]
        else:
            assert said.read_text() == ""
            assert zckpt.convert(folder, out).path == out  # clears what was left
            assert sorted(place.iterdir()) == [out, said]
