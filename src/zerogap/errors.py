"""The exceptions zerogap raises on purpose.

One root, few branches: a user's mistake is a `ConfigError` (also a `ValueError`) that names the key, the value and the
mend; a difference between two numerics contracts is a `ContractError`; a file that is missing, corrupt or foreign is a
`CheckpointError`; too little memory for what was asked is a `CapacityError`; log-probs that must be equal and are not
raise `ParityError`. Our own bugs are `assert` statements with a message, never one of these.
"""


class ZerogapError(Exception):
    """Root of every error that zerogap raises deliberately."""


class ConfigError(ZerogapError, ValueError):
    """A setting or an input that cannot be honoured.

    Args:
        key: dotted name of the setting, argument or file that is wrong.
        value: what was given.
        mend: what to do instead, as a short imperative sentence.
    """

    def __init__(self, key: str, value: object, mend: str) -> None:
        super().__init__(f"{key} = {value!r}: {mend}")
        self.key, self.value, self.mend = key, value, mend


class ContractError(ZerogapError):
    """Two sides, or a checkpoint and a run, follow different numerics contracts."""


class CheckpointError(ZerogapError):
    """A checkpoint or model file is missing, incomplete, corrupt, or does not fit the model."""


class OutputError(ZerogapError):
    """A file that a run or a command writes could not be written: a full disk, a folder that is gone or read-only."""


class CapacityError(ZerogapError):
    """A memory budget cannot hold what was asked for."""


class ParityError(ZerogapError):
    """Log-probs of rollout and trainer differ although both claim the same identity and weight version."""


class NonFiniteError(ZerogapError):
    """A NaN or infinity at a place that takes part in the result; names where (sample, position, tensor)."""
