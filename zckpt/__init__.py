"""Get a model out of DeepSpeed ZeRO-3 whole, prove that it is the model that was trained, load it.

The public names are imported when they are first used: `import zckpt` imports neither torch nor
deepspeed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from zckpt import errors as errors

__version__ = "0.1.0"

_HOMES = {
    "ConvertReport": "zckpt.verbs.convert",
    "DiffReport": "zckpt.verbs.diff",
    "LoadReport": "zckpt.verbs.restore",
    "SaveReport": "zckpt.verbs.save",
    "VerifyReport": "zckpt.verbs.verify",
    "ZckptError": "zckpt.errors",
    "convert": "zckpt.verbs.convert",
    "diff": "zckpt.verbs.diff",
    "load_consolidated": "zckpt.verbs.restore",
    "open": "zckpt.sources.opening",
    "resync": "zckpt.verbs.resync",
    "save_consolidated": "zckpt.verbs.save",
    "verify": "zckpt.verbs.verify",
}
"""Each public name and the module it lives in."""

__all__ = list(_HOMES)

if TYPE_CHECKING:
    from zckpt.errors import ZckptError as ZckptError
    from zckpt.sources.opening import open as open  # noqa: A004 -- as zckpt.open
    from zckpt.verbs.convert import ConvertReport as ConvertReport
    from zckpt.verbs.convert import convert as convert
    from zckpt.verbs.diff import DiffReport as DiffReport
    from zckpt.verbs.diff import diff as diff
    from zckpt.verbs.restore import LoadReport as LoadReport
    from zckpt.verbs.restore import load_consolidated as load_consolidated
    from zckpt.verbs.resync import resync as resync
    from zckpt.verbs.save import SaveReport as SaveReport
    from zckpt.verbs.save import save_consolidated as save_consolidated
    from zckpt.verbs.verify import VerifyReport as VerifyReport
    from zckpt.verbs.verify import verify as verify


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'zckpt' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
