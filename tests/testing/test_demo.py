"""The demo: its own verdict, and the same numbers computed without it."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zckpt
from zckpt.cli import main
from zckpt.testing import demo

WINDOWS, WINDOW = 16, 128


def call(*arguments):
    with pytest.raises(SystemExit) as exit_:
        main([str(argument) for argument in arguments])
    return exit_.value.code


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A short run from the command line: its folder and its JSON."""
    folder = tmp_path_factory.mktemp("demo") / "out"
    done = subprocess.run(
        [sys.executable, "-m", "zckpt", "demo", folder, "--steps", "8", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert all(line.startswith("note: ") for line in done.stderr.splitlines())
    return folder, json.loads(done.stdout)


@pytest.mark.engine
def test_all_losses_are_the_recorded_one(ran):
    folder, document = ran
    manifest = json.loads((folder / "zckpt_manifest.json").read_bytes())
    recorded = manifest["evaluation"]["mean"]
    assert document["recorded"] == recorded
    assert [item["losses"] for item in document["evaluations"]] == [
        [recorded] * ranks for ranks in (2, 1, 1, 3)
    ]
    assert document["is_fine"] is True
    assert float(recorded["decimal"]) < float(document["before_training"]["decimal"]) - 1


@pytest.mark.engine
def test_the_checkpoint_is_of_a_tied_model_in_uneven_partitions(ran):
    folder, _ = ran
    manifest = json.loads((folder / "zckpt_manifest.json").read_bytes())
    assert manifest["ties"] == {"declared": True, "actual": True}
    assert (manifest["provenance"]["zero_stage"], manifest["provenance"]["world_size"]) == (3, 2)
    sizes = [torch.Size(record["shape"]).numel() for record in manifest["tensors"]]
    assert any(size % 2 for size in sizes)
    assert any(size % 3 for size in sizes)


@pytest.mark.engine
def test_the_recorded_loss_is_that_of_the_files(ran):
    transformers = pytest.importorskip("transformers")
    folder, document = ran
    text = [
        token
        for file in sorted(Path(zckpt.__file__).parent.rglob("*.py"))
        for token in (*file.read_bytes(), 256)
    ]
    batch = torch.tensor(text[-WINDOWS * WINDOW :]).view(WINDOWS, WINDOW)
    model = transformers.GPT2LMHeadModel.from_pretrained(folder).to(torch.bfloat16).eval()
    with torch.no_grad():
        scores = model(batch).logits[:, :-1].float().log_softmax(-1)
    loss = -scores.gather(-1, batch[:, 1:, None]).mean().item()
    assert loss == pytest.approx(float(document["recorded"]["decimal"]), rel=1e-3)


@pytest.mark.engine
def test_verify_evaluates_the_checkpoint_again(ran):
    evaluation = "zckpt.testing.demo:evaluate_checkpoint"
    assert call("verify", ran[0], "--eval", evaluation, "--quiet") == 0


def test_a_missing_extra_is_named_before_anything_starts(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert call("demo", tmp_path / "out") == 2
    assert "pip install 'zckpt[train,transformers]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [[], ["--overwrite"]])
def test_a_folder_with_something_else_in_it_is_refused(monkeypatch, tmp_path, options):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: "installed")
    (tmp_path / "mine.txt").write_text("mine")
    assert call("demo", tmp_path, *options) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_one_rank_that_differs_in_the_last_bit_fails_the_demo(monkeypatch, capsys, tmp_path):
    off = 2.5000000000000004
    report = demo.DemoReport(
        path=tmp_path,
        before=5.0,
        recorded=2.5,
        evaluations=(
            demo.Evaluation(what="live", losses=(2.5, 2.5), is_equal=True),
            demo.Evaluation(what="loaded", losses=(2.5, off), is_equal=False),
        ),
        seconds={"training": 1.0},
    )
    monkeypatch.setattr(demo, "run", lambda *_, **__: report)
    assert call("demo", tmp_path, "--quiet") == 1
    out, err = capsys.readouterr()
    assert (2.5).hex() in out
    assert off.hex() in out
    assert "differs: not the same model everywhere" in out
    assert err == ""
    assert call("demo", tmp_path, "--json", "--quiet") == 1
    assert json.loads(capsys.readouterr().out)["is_fine"] is False
