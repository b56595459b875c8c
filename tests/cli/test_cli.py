"""The command line: what goes to stdout and stderr, and what it exits with."""

import json
import shutil
import struct
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import zckpt
from zckpt import errors
from zckpt.cli import main

LOSS = 0.1
LOSS_HEX = "0x1.999999999999ap-4"  # IEEE 754's nearest to 0.1


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(10, 100, bias=False)
        self.register_buffer("steps", torch.tensor([3], dtype=torch.int64))
        self.register_buffer("angles", torch.ones(5), persistent=False)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(30, 10)
        self.layers = nn.ModuleList(Block() for _ in range(12))
        self.norm = nn.LayerNorm(10).requires_grad_(False)
        self.head = nn.Linear(10, 30, bias=False)
        self.head.weight = self.wte.weight


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch):
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "ZCKPT_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Model()


@pytest.fixture(scope="module")
def pristine(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "saved"
    zckpt.save_consolidated(model, folder, eval_fn=lambda _: LOSS)
    return folder


@pytest.fixture
def saved(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "saved")


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


def edit_manifest(folder, edit):
    path = folder / "zckpt_manifest.json"
    manifest = json.loads(path.read_bytes())
    edit(manifest)
    path.write_text(json.dumps(manifest))


def flip_byte_of(path, name):
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    start = json.loads(data[8 : 8 + length])[name]["data_offsets"][0]
    data[8 + length + start] ^= 1
    path.write_bytes(data)


def write_eval(folder, monkeypatch, name, body):
    """Make `<name>.py` in a folder that is then the current one."""
    (folder / f"{name}.py").write_text(body)
    monkeypatch.chdir(folder)


# ------------------------------------------------------------------ the whole


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        *([verb, "--help"] for verb in ("inspect", "verify", "diff", "demo")),
    ],
)
def test_neither_torch_nor_deepspeed_is_imported_to_answer(arguments):
    code = f"""
import sys
import zckpt
from zckpt.cli import main
try:
    main({arguments})
finally:
    heavy = {{"torch", "deepspeed", "transformers", "safetensors", "numpy"}} & sys.modules.keys()
    print(sorted(heavy), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"


def test_python_m_runs_it():
    done = subprocess.run(
        [sys.executable, "-m", "zckpt", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"zckpt {zckpt.__version__}\n"


@pytest.mark.parametrize("verb", ["inspect", "verify", "diff", "demo"])
def test_help_gives_examples_and_exit_codes(run, verb):
    code, out, _ = run(verb, "--help")
    assert code == 0
    assert out.count(f" zckpt {verb}") >= 3
    assert "Exit codes: 0 fine, 1 a check found a difference, 2 usage error" in out


@pytest.mark.parametrize(
    "arguments", [[], ["nonsense"], ["inspect"], ["inspect", "a", "--depth", "0"], ["verify", "-x"]]
)
def test_what_typer_refuses_is_a_usage_error(run, arguments):
    assert run(*arguments)[0] == 2


EXIT_CODES = {
    errors.NotACheckpointError: 3,
    errors.CorruptCheckpointError: 3,
    errors.ManifestError: 3,
    errors.ManifestVersionError: 3,
    PermissionError: 3,
    errors.UsageError: 2,
    errors.TargetExistsError: 2,
    errors.MissingExtraError: 2,
    errors.UnsupportedError: 2,
    errors.NoSpaceError: 2,
    errors.SpecMismatchError: 1,
}


@pytest.mark.parametrize("kind", EXIT_CODES)
def test_a_known_exception_is_two_lines_and_a_code(run, monkeypatch, kind):
    def fail(*_, **__):
        raise kind("what [red]went[/red] wrong")

    monkeypatch.setattr("zckpt.verbs.inspect.inspect", fail)
    code, out, err = run("inspect", "x")
    first, second = err.splitlines()
    assert (code, out) == (EXIT_CODES[kind], "")
    assert first == "error: what [red]went[/red] wrong"
    assert second.startswith("next:  ")


def test_the_traceback_is_shown_on_request(run, monkeypatch, tmp_path):
    monkeypatch.setenv("ZCKPT_TRACEBACK", "1")
    code, _, err = run("inspect", tmp_path / "nothing")
    assert code == 3
    assert "Traceback" in err
    assert "error: " in err


def test_an_unknown_exception_is_shown_and_told_apart_from_a_difference(monkeypatch, capsys):
    def fail(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr("zckpt.verbs.inspect.inspect", fail)
    with pytest.raises(SystemExit) as exited:
        main(["inspect", "x"])
    assert exited.value.code == 70
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_a_path_that_is_not_there(run, verb, tmp_path):
    code, out, err = run(verb, tmp_path / "nothing")
    assert (code, out) == (3, "")
    assert f"{tmp_path / 'nothing'}: no such file or folder." in err


@pytest.mark.parametrize(
    "verb, said", [("inspect", "'global_step1'"), ("verify", "DeepSpeed ZeRO folder")]
)
def test_a_zero_folder_is_named_as_one(run, verb, said, tmp_path):
    (tmp_path / "latest").write_text("global_step1")
    code, out, err = run(verb, tmp_path)
    assert (code, out) == (3, "")
    assert said in err


# ------------------------------------------------------------------ inspect


def test_inspect_shows_the_tree(run, saved):
    code, out, err = run("inspect", saved)
    lines = [line.lstrip("│├└─ ") for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert lines[0] == f"zckpt checkpoint {saved}"
    assert "wte.weight  [30, 10] float32  1.2 kB" in lines
    assert "head.weight  -> wte.weight" in lines
    # 12 blocks of 10 * 100 * 4 + 8 bytes
    assert "layers  24 tensors  48.1 kB" in lines
    assert "0-11  12 alike  2 tensors each  4.0 kB each  48.1 kB together" in lines
    assert lines.count("fc.weight  [100, 10] float32  4.0 kB") == 1
    assert lines.count("steps  [1] int64  8 bytes  (buffer)") == 1
    assert lines.count("angles  [5] float32  (buffer, not stored)") == 1
    assert "bias  [10] float32  40 bytes  (frozen)" in lines
    assert f"evaluation  {LOSS}  {LOSS_HEX}  (float32 on cpu, 1 rank)" in lines


def test_inspect_keeps_layers_apart_that_differ(run, saved):
    def unown(manifest):
        (record,) = (r for r in manifest["tensors"] if r["name"] == "layers.5.fc.weight")
        record["value_from"] = "unowned"

    edit_manifest(saved, unown)
    lines = [line.lstrip("│├└─ ") for line in run("inspect", saved)[1].splitlines()]
    assert [line.split("  ")[:2] for line in lines if line[0].isdecimal()] == [
        ["0-4", "5 alike"],
        ["5", "2 tensors"],
        ["6-11", "6 alike"],
    ]
    assert "fc.weight  [100, 10] float32  4.0 kB  (unowned)" in lines


def test_inspect_stops_at_a_depth(run, saved):
    out = run("inspect", saved, "--depth", "1")[1]
    assert "layers  24 tensors  48.1 kB" in out
    assert "alike" not in out


def test_inspect_shows_what_the_manifest_warns_of(run, saved):
    def warn(manifest):
        stale = {"decimal": "0.25", "hex": "0x1.0000000000000p-2"}
        manifest["evaluation"]["with_stale_copies"] = stale
        manifest["left_out"] = [{"name": "head.scaler", "reason": "no tensor"}]
        manifest["warnings"] = ["look [here]"]

    edit_manifest(saved, warn)
    out = run("inspect", saved)[1]
    assert "0.25  0x1.0000000000000p-2  (with the stale copies in place)" in out
    assert "left out    head.scaler: no tensor" in out
    assert "warning     look [here]" in out


def test_inspect_json_is_one_document_with_everything(run, saved, model):
    code, out, err = run("inspect", saved, "--json")
    document = json.loads(out)
    expected = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    assert (code, err) == (0, "")
    assert {t["name"]: (t["shape"], t["size_bytes"]) for t in document["tensors"]} == {
        name: (list(value.shape), value.nbytes) for name, value in expected.items()
    }
    assert document["size_bytes"] == sum(value.nbytes for value in expected.values())
    assert document["aliases"] == {"head.weight": "wte.weight"}
    assert document["manifest"] == json.loads((saved / "zckpt_manifest.json").read_bytes())
    file = saved / "model.safetensors"
    assert document["files"] == {file.name: file.stat().st_size}


def test_inspect_reads_a_hugging_face_folder(run, tmp_path):
    save_file({"a.b": torch.zeros(3, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    code, out, err = run("inspect", tmp_path)
    assert code == 0
    assert out.startswith("Hugging Face folder ")
    assert "a.b  [3] bfloat16  6 bytes" in out
    assert err == "note: no manifest: origins, buffers and evaluation are not known\n"
    assert run("inspect", tmp_path, "--quiet") == (0, out, "")
    assert json.loads(run("inspect", tmp_path / "model.safetensors", "--json")[1])["kind"] == (
        "safetensors file"
    )


# ------------------------------------------------------------------ verify


def test_verify_says_what_it_checked(run, saved, model):
    code, out, err = run("verify", saved)
    checked, verdict = out.splitlines()
    size_kb = sum(t.nbytes for n, t in model.state_dict().items() if n != "head.weight") / 1000
    assert (code, err) == (0, "")
    assert checked.startswith(f"1 file compared, 27 tensors hashed, {size_kb:.1f} kB in ")
    assert checked.endswith(" s")  # a rate of so few bytes would say nothing
    assert verdict == f"fine: {saved}: all that was compared agrees"


def test_verify_json_is_one_document(run, saved, model):
    code, out, err = run("verify", saved, "--json")
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert document["verdict"] == "fine"
    assert document["findings"] == []
    assert document["tensors_checked"] == 27
    assert document["loss"] is None


def test_a_flipped_byte_is_corrupt_and_its_tensor_is_named(run, saved):
    flip_byte_of(saved / "model.safetensors", "layers.7.fc.weight")
    code, out, err = run("verify", saved)
    assert (code, err) == (3, "")
    (row,) = (line for line in out.splitlines() if "layers.7.fc.weight" in line)
    assert row.split()[:2] == ["corrupt", "layers.7.fc.weight"]
    assert out.splitlines()[-1].startswith(f"corrupt: {saved}: 1 finding")
    code, out, _ = run("verify", saved, "--json")
    assert code == 3
    assert [f["where"] for f in json.loads(out)["findings"]] == ["layers.7.fc.weight"]


def test_headers_only_does_not_read_the_values(run, saved):
    flip_byte_of(saved / "model.safetensors", "layers.7.fc.weight")
    code, out, _ = run("verify", saved, "--headers-only")
    assert code == 0
    assert out.startswith("1 file compared, no tensor hashed\n")


def test_a_truncated_file_is_corrupt(run, saved):
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    code, out, _ = run("verify", saved)
    assert code == 3
    assert "cut short" in out
    code, out, err = run("inspect", saved)
    assert (code, out) == (3, "")
    assert "zckpt verify " in err.splitlines()[1]


def test_a_manifest_of_another_version_is_not_read(run, saved):
    edit_manifest(saved, lambda manifest: manifest.update(schema_version=99))
    assert run("verify", saved)[0] == 3
    code, _, err = run("inspect", saved)
    assert code == 3
    assert "next:  pip install --upgrade zckpt" in err


def test_an_extra_file_differs(run, saved):
    (saved / "notes.txt").write_text("mine")
    code, out, _ = run("verify", saved)
    assert code == 1
    assert "notes.txt" in out
    assert out.splitlines()[-1] == f"differs: {saved}: 1 finding"


def test_corrupt_outweighs_differs(run, saved):
    (saved / "notes.txt").write_text("mine")
    flip_byte_of(saved / "model.safetensors", "wte.weight")
    assert run("verify", saved)[0] == 3


def test_a_hugging_face_folder_has_only_headers_to_verify(run, tmp_path):
    save_file({"a": torch.zeros(3)}, tmp_path / "model.safetensors")
    code, out, err = run("verify", tmp_path)
    assert code == 0
    assert out.startswith(f"fine: {tmp_path}: headers and index agree; without a manifest")
    assert err.startswith("note: no zckpt_manifest.json")
    assert run("verify", tmp_path, "--quiet")[2] == ""
    save_file({"a": torch.zeros(0)}, tmp_path / "model.safetensors")
    assert run("verify", tmp_path)[0] == 1


def test_a_row_is_one_line_in_a_pipe(run, saved):
    name = "a" * 200
    (saved / name).touch()
    assert any(name in line and "differs" in line for line in run("verify", saved)[1].splitlines())


@pytest.mark.parametrize(
    "name, loss, options, code",
    [
        ("equal_loss", LOSS, [], 0),
        ("next_loss", 0.10000000000000002, [], 1),
        ("near_loss", LOSS * 1.001, ["--rtol", "0.01"], 0),
        ("far_loss", LOSS * 1.1, ["--rtol", "0.01"], 1),
        ("nan_loss", float("nan"), ["--rtol", "0.01"], 1),
    ],
)
def test_eval_is_compared_with_the_recorded_loss(
    run, saved, monkeypatch, *, name, loss, options, code
):
    body = f"print('noise')\ndef f(path):\n    print(path)\n    return float({str(loss)!r})\n"
    write_eval(saved.parent, monkeypatch, name, body)
    found, out, err = run("verify", "saved", "--eval", f"{name}:f", *options, "--json")
    document = json.loads(out)
    assert found == code
    assert document["recorded_loss"] == {"decimal": "0.1", "hex": LOSS_HEX}
    assert document["loss"]["hex"] == loss.hex()
    assert err == "noise\nsaved\n"


def test_eval_shows_both_losses(run, saved, monkeypatch):
    write_eval(saved.parent, monkeypatch, "half_loss", "def f(path):\n    return 0.5\n")
    code, out, _ = run("verify", "saved", "--eval", "half_loss:f")
    assert code == 1
    assert "loss now       0.5  0x1.0000000000000p-1" in out
    assert f"loss recorded  0.1  {LOSS_HEX}" in out


@pytest.mark.parametrize(
    "name, why",
    [
        ("no_colon", "expected MODULE:FUNCTION"),
        (":f", "expected MODULE:FUNCTION"),
        (".relative:f", "expected MODULE:FUNCTION"),
        ("no_such_module_zckpt:f", "cannot import no_such_module_zckpt"),
        ("json:no_such_function", "json has no function no_such_function"),
        ("json:__name__", "json has no function __name__"),
    ],
)
def test_a_bad_eval_is_a_usage_error(run, saved, name, why):
    code, out, err = run("verify", saved, "--eval", name)
    assert (code, out) == (2, "")
    assert f"error: --eval {name}: {why}" in err


@pytest.mark.parametrize("options", [["--rtol", "0.1"], ["--rtol", "-1", "--eval", "json:loads"]])
def test_a_bad_rtol_is_a_usage_error(run, saved, options):
    assert run("verify", saved, *options)[0] == 2


def test_eval_needs_a_recorded_evaluation(run, model, tmp_path):
    zckpt.save_consolidated(model, tmp_path / "saved")
    code, _, err = run("verify", tmp_path / "saved", "--eval", "json:loads")
    assert code == 2
    assert "no recorded evaluation" in err


def test_a_function_that_fails_is_the_users_and_shown(run, saved, tmp_path, monkeypatch):
    (tmp_path / "my_failing.py").write_text(
        "def loss(path):\n    raise KeyError('no such batch')\ndef nothing(path):\n    pass\n"
    )
    (tmp_path / "my_broken.py").write_text("def loss(path:\n")
    monkeypatch.chdir(tmp_path)
    for spec, said in {
        "my_failing:loss": "raised KeyError: 'no such batch'",
        "my_failing:nothing": "raised TypeError",
        "my_broken:loss": "cannot import my_broken: SyntaxError",
    }.items():
        code, out, err = run("verify", saved, "--eval", spec)
        assert (code, out) == (2, "")
        assert said in err


def test_a_long_name_is_whole_in_a_narrow_terminal(saved, monkeypatch):
    from rich.console import Console

    from zckpt.cli import verify as command
    from zckpt.verbs.verify import Finding, VerifyReport

    shown = Console(width=80, record=True, force_terminal=True)
    monkeypatch.setattr(command, "stdout", lambda: shown)
    name = "transformer.h.1.mlp.c_proj.weight_with_a_long_name"
    what = f"blake3-16MiB digest {'a' * 64}, {'b' * 64} in the manifest"
    command._print(VerifyReport(path=saved, findings=(Finding("corrupt", name, what),)), 1.0)
    text = shown.export_text()
    assert name in "".join(line[12:44].strip() for line in text.splitlines())  # its column
    assert "aaaaaaaaaaaa…" in text
