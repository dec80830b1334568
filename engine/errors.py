"""The ways in which the engine says no: the caller's fault, its own, or that of a lost group."""


class BadInput(ValueError):
    """What the caller passed cannot be used; the message names the value and the limit."""


class LawError(RuntimeError):
    """A rule of the engine was broken: a defect in the engine or in a drafter, never swallowed."""


class GroupError(RuntimeError):
    """The state that a group of rows shares is lost; other groups are not concerned."""


def one_line(error: BaseException) -> str:
    """What a foreign error says, for use in a `BadInput`."""
    said = " ".join(str(error).split())
    # These say what is wrong themselves; others, a KeyError above all, name a thing and no more.
    if said and isinstance(error, OSError | ValueError):
        return said
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
