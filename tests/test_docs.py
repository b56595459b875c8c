"""The documentation is true: its examples run, its links lead somewhere, it names every field."""

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import zckpt
from zckpt import manifest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
DOCUMENTS += [ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(document, language):
    """The contents of a document's fenced blocks in a language, in order."""
    return re.findall(
        rf"^```{language}\n(.*?)^```$", document.read_text(), re.DOTALL | re.MULTILINE
    )


def examples():
    """The README's files by name (each names itself in its first line), and its command lines."""
    files = {
        re.match(r"# (\w+\.py)\n", text).group(1): text
        for text in blocks(ROOT / "README.md", "python")
    }
    commands = [line for text in blocks(ROOT / "README.md", "sh") for line in text.splitlines()]
    return files, commands


def test_the_readme_has_these_examples():
    files, commands = examples()
    assert list(files) == ["tiny.py", "train.py", "load.py", "test_reload.py"]
    assert [re.sub(r"^([A-Z_]+=\w+ )+", "", line).split()[0] for line in commands] == [
        "torchrun",
        *["zckpt"] * 6,
        "python",
        "pytest",
    ]


@pytest.fixture
def run(tmp_path):
    """Run a command line in a folder with the README's files; what it printed."""
    folder = tmp_path / "examples"
    folder.mkdir()
    for name, text in examples()[0].items():
        (folder / name).write_text(text)
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "zckpt").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m zckpt "$@"\n')
    (programs / "zckpt").chmod(0o755)
    # A reader's shell has none of what the tests set: torchrun must see the script's own folder.
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in {"PYTHONSAFEPATH", "DS_ACCELERATOR", "PYTEST_ADDOPTS"}
    }
    package = Path(zckpt.__file__).parent
    if "site-packages" not in package.parts:
        environment["PYTHONPATH"] = str(package.parent)
    beside_python = Path(sys.executable).parent
    environment["PATH"] = f"{beside_python}:{programs}:{environment['PATH']}"

    def call(line):
        done = subprocess.run(
            ["sh", "-c", line],
            cwd=folder,
            env=environment,
            check=False,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, f"$ {line}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return call


@pytest.mark.ranks
@pytest.mark.engine
def test_the_examples_of_the_readme_run_as_they_stand(run):
    train, convert, diff, against, inspect, verify, evaluate, load, test = examples()[1]
    assert "{'head.weight': 'embed.weight'}" in run(train)
    assert "head.weight -> embed.weight" in run(convert)
    assert "4 names: 4 equal" in run(diff)  # else its exit code is 1
    assert "fine: converted" in run(against)
    shown = run(inspect)
    assert "head.weight  -> embed.weight" in shown
    assert "on 2 ranks, ZeRO stage 3" in shown
    assert "3 tensors hashed" in run(verify)
    assert "fine: out/checkpoint-40" in run(evaluate)
    run(load)
    assert "2 passed" in run(test)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_lead_to_files(document):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text())
    relative = [link for link in links if "://" not in link]
    assert [link for link in relative if not (document.parent / link).exists()] == []


def structs():
    found = [value for value in vars(manifest).values() if isinstance(value, type)]
    return [cls for cls in found if issubclass(cls, manifest.Record) and cls is not manifest.Record]


@pytest.mark.parametrize("struct", structs(), ids=lambda cls: cls.__name__)
def test_the_format_names_every_field_and_no_other(struct):
    text = (ROOT / "docs" / "format.md").read_text()
    (section,) = re.findall(
        rf"^### {struct.__name__}\n(.*?)(?=^##|\Z)", text, re.DOTALL | re.MULTILINE
    )
    named = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert named == [field.name for field in msgspec.structs.fields(struct)]


def test_the_format_s_examples_are_real():
    shown, run_record = blocks(ROOT / "docs" / "format.md", "json")
    assert manifest.parse_manifest(shown.encode()).to_json().decode() == shown
    decoded = msgspec.json.decode(run_record, type=manifest.RunRecord)
    assert decoded.to_json().decode() == run_record


def test_the_map_of_the_code_has_every_module():
    package = ROOT / "zckpt"
    text = (ROOT / "ARCHITECTURE.md").read_text()
    table = text[text.index("## Code map") : text.index("## Invariants")]
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", table))
    modules = {path.relative_to(package) for path in package.rglob("*.py")}
    parts = {path.name for path in modules} | {path.as_posix() for path in modules}
    assert named - parts == {"verbs/", "testing/", "compat/", "cli/"}
    for module in modules:
        is_in_a_named_package = f"{module.parent}/" in named and module.name in named
        is_found = module.as_posix() in named or is_in_a_named_package
        assert is_found or module.name == "__init__.py", f"{module} is not in the code map"
