"""Every error zckpt raises on purpose.

Each is a `ZckptError` and also the builtin that a caller who does not know zckpt would catch::

    ZckptError
    ├── UsageError               ValueError         an argument, or a mix of them, makes no sense
    ├── UnsupportedError         ValueError         a model or engine that zckpt cannot do right
    ├── MissingExtraError        ImportError        an optional package is needed and not installed
    ├── NameCollisionError       ValueError         two tensors would be stored under one name
    ├── LayoutError              RuntimeError       partitions do not lie where they must
    ├── StaleCopiesError         RuntimeError       gathered copies disagree with their partitions
    ├── SpecMismatchError        ValueError         names, shapes or dtypes of two sides differ
    ├── TargetExistsError        FileExistsError    the folder to write holds something
    ├── NoSpaceError             OSError            the disk cannot hold the checkpoint
    ├── NotACheckpointError      FileNotFoundError  nothing that can be read as a checkpoint
    ├── CorruptCheckpointError   OSError            a file is not what its header or manifest says
    │   ├── MissingParametersError          parameters of the module are nowhere in the folder
    │   ├── UnsafePickleError    OSError            a pickle would run code
    │   └── ManifestError        OSError            the manifest cannot be understood
    │       └── ManifestVersionError                ... because it is of another version
    └── RankError                RuntimeError       another rank failed, or was lost
        └── AbsentRanksError     TimeoutError       another rank never made the call

Messages name the tensor, file or rank, what was expected, what was found, and what to do.
"""


class ZckptError(Exception):
    """Base of every error that zckpt raises on purpose."""


class UsageError(ZckptError, ValueError):
    """An argument, or a combination of arguments, makes no sense."""


class UnsupportedError(ZckptError, ValueError):
    """A model, engine or tensor that zckpt cannot save or load correctly, so it refuses."""


class MissingExtraError(ZckptError, ImportError):
    """An optional package is needed for what was asked and is not installed."""


class NameCollisionError(ZckptError, ValueError):
    """Two different tensors would end up under one name."""


class LayoutError(ZckptError, RuntimeError):
    """Partitions do not lie where DeepSpeed's own bookkeeping says they do."""


class StaleCopiesError(ZckptError, RuntimeError):
    """Gathered copies of parameters disagree with the partitions they were gathered from."""


class SpecMismatchError(ZckptError, ValueError):
    """Names, shapes or dtypes of a checkpoint and its target differ."""


class TargetExistsError(ZckptError, FileExistsError):
    """The folder that is to be written already holds something."""


class NoSpaceError(ZckptError, OSError):
    """The file system cannot hold the checkpoint."""


class NotACheckpointError(ZckptError, FileNotFoundError):
    """There is nothing at the path that can be read as a checkpoint."""


class CorruptCheckpointError(ZckptError, OSError):
    """A file is not what its own header, the index or the manifest says it is."""


class MissingParametersError(CorruptCheckpointError):
    """A ZeRO folder has the names of parameters, or not even these, but not their values."""


class UnsafePickleError(CorruptCheckpointError):
    """A pickle would call something else than the constructors of tensors. Nothing was run."""


class ManifestError(CorruptCheckpointError):
    """The manifest cannot be understood."""


class ManifestVersionError(ManifestError):
    """The manifest is of a schema version that this zckpt does not know."""


class RankError(ZckptError, RuntimeError):
    """Another rank failed or was lost while this one was fine."""


class AbsentRanksError(RankError, TimeoutError):
    """Ranks that had to make the same call did not make it in time."""
