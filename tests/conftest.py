"""What every test relies on."""

import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import zckpt


def pytest_configure():
    """Refuse to test the checkout when the caller meant to test the installed wheel."""
    if os.environ.get("ZCKPT_TEST_INSTALLED") != "1":
        return
    location = Path(zckpt.__file__)
    if "site-packages" not in location.parts:
        pytest.exit(f"ZCKPT_TEST_INSTALLED=1, but zckpt was imported from {location}", returncode=3)


@dataclass(frozen=True)
class RealFolder:
    """One folder in `tests/zero`, and what is known of it without zckpt."""

    place: Path

    @property
    def ckpt(self) -> Path:
        """What DeepSpeed wrote."""
        return self.place / "ckpt"

    @cached_property
    def facts(self) -> dict:
        """What is known of the run; a damaged folder's is that of the folder it was made from."""
        if (self.place / "truth.json").exists():
            return json.loads((self.place / "truth.json").read_text())
        return RealFolder(self.place.parent / self.expect["derived_from"]).facts

    @cached_property
    def expect(self) -> dict:
        """What a reader has to make of a damaged folder."""
        return json.loads((self.place / "expect.json").read_text())

    @cached_property
    def expected(self) -> dict[str, torch.Tensor]:
        """Every value that is in the folder: masters, other parameters, stored buffers."""
        return self.expected_in("truth.safetensors")

    def expected_in(self, name: str) -> dict[str, torch.Tensor]:
        """Return the same by another file of truths."""
        return self._values(name, ("fp32/", "live/"))

    @cached_property
    def live(self) -> dict[str, torch.Tensor]:
        """The same with the module's own values in the place of masters."""
        return self._values("truth.safetensors", ("live/",))

    @cached_property
    def masters(self) -> set[str]:
        """Names of what the optimizer holds, aliases too."""
        names = {n[5:] for n in load_file(self.place / "truth.safetensors") if n[:5] == "fp32/"}
        return {plain(n) for name in names for n in self._tied(name)}

    @property
    def ties(self) -> set[frozenset[str]]:
        """The names of each shared tensor."""
        return {frozenset(map(plain, group)) for group in self.facts.get("tied_groups", ())}

    def _tied(self, name: str) -> list[str]:
        groups = self.facts.get("tied_groups", ())
        return next((group for group in groups if name in group), [name])

    def _values(self, file: str, kinds: tuple[str, ...]) -> dict[str, torch.Tensor]:
        truth = load_file(self.place / file)
        found = {}
        for name in [n.removeprefix("live/") for n in truth if n.startswith("live/")]:
            keys = [kind + n for kind in kinds for n in self._tied(name) if kind + n in truth]
            found[plain(name)] = truth[keys[0]]
        for name, buffer in self.facts.get("buffers", {}).items():
            if buffer["persistent"]:
                found[plain(name)] = truth[f"buffer/{name}"]
        for name in self.facts.get("expected_missing", ()):
            del found[plain(name)]
        return found


def plain(name: str) -> str:
    """Return a name without what torch.compile puts into it."""
    return name.replace("_orig_mod.", "")


@pytest.fixture(scope="session")
def zero_folder():
    """Return the `RealFolder` of a name; the same object each time, never to be changed."""
    folders: dict[str, RealFolder] = {}

    def find(name: str) -> RealFolder:
        return folders.setdefault(name, RealFolder(Path(__file__).parent / "zero" / name))

    return find
