"""The two ways the engine says no."""


class BadInput(ValueError):
    """What the caller passed cannot be used; the message names the value and the limit."""


class LawError(RuntimeError):
    """A rule of the engine was broken: a defect in the engine or in a drafter, never swallowed."""


class GroupError(RuntimeError):
    """The state that a group of rows shares is lost; other groups are not concerned."""
