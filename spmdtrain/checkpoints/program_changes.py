"""Differences between the programs of two starts of a run: optimizer, code, settings, versions."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from spmdtrain.distributed import numeric_settings
from spmdtrain.errors import option
from spmdtrain.step.optimizer_record import changed_arguments, changed_constants

if TYPE_CHECKING:  # `run_identity` imports this module
    from spmdtrain.checkpoints.run_identity import Identity

_MOST_NAMED = 3  # functions in one line
# Libraries on whose version the digests of functions depend.
_OF_DIGESTS = ("python", "jax", "flax", "optax", "keras", "spmdtrain")


def anyway() -> str:
    """Returns the advice to continue with another program."""
    return f"continue with other numbers ({option('resume_anyway', True)})"


def setting_problem(saved: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """Returns the setting that gives results another meaning, and how to restore its value."""
    for name, (before, here, is_meaning) in numeric_settings.differences(saved, now).items():
        if is_meaning:
            # The key in the state has the shape of its generator.
            onward = "" if name == "jax_default_prng_impl" else f", {anyway()}"
            return (
                f"{name}={before}, and this process has {here}, which gives other numbers: "
                f"{numeric_settings.way_back(name, before)}{onward}"
            )
    return None


def optimizer_problem(saved: "Identity", now: "Identity") -> str | None:
    """Returns how optimizers with equal arrays differ in their operations; None if they do not."""
    before, here = saved.update, now.update
    if before.kind == here.kind or _why_not_compared(saved, now) is not None:
        return None
    changed = "; ".join(changed_arguments(before, here))
    difference = f" ({changed})" if changed else ", with other operations"
    return f"{before.name} there and {here.name} here{difference}"


def program_changes(saved: "Identity", now: "Identity") -> list[str]:
    """Returns the differences between the programs of two runs, each as `name: before -> after`."""
    found = [f"optimizer: {text}" for text in _optimizer_changes(saved, now)]
    found += changed_functions(saved, now)
    settings = numeric_settings.differences(saved.settings, now.settings)
    found += [f"{name}: {before} -> {here}" for name, (before, here, _) in settings.items()]
    return found + [
        f"version of {name}: {before} -> {now.versions[name]}"
        for name, before in saved.versions.items()
        if name in now.versions and now.versions[name] != before
    ]


def changed_functions(saved: "Identity", now: "Identity") -> list[str]:
    """Returns the user's functions that differ between two runs, as `name: before -> after`."""
    both = saved.functions.keys() & now.functions.keys()
    names = sorted(name for name in both if saved.functions[name] != now.functions[name])
    for library in _OF_DIGESTS if names else ():
        if saved.versions.get(library) != now.versions.get(library):
            reason = f"the version of {library} differs"
            return [f"code of {', '.join(names)}: not compared, because {reason}"]
    return [
        f"code of {name}{_changed_parts(saved.parts.get(name, {}), now.parts.get(name, {}))}: "
        f"{saved.functions[name]} -> {now.functions[name]}"
        for name in names
    ]


def _changed_parts(saved: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Returns the names and places of functions that differ; "" if they are not known."""
    changed = {}
    for name in [*now, *(name for name in saved if name not in now)]:
        before, _, old_place = saved.get(name, "").partition(" ")
        here, _, new_place = now.get(name, "").partition(" ")
        if before != here:
            kind = "" if before and here else ("new " if here else "removed ")
            place = new_place or old_place
            changed[name] = f"{kind}{name}" + f" ({place})" * bool(place)
    # A changed function says more than the functions that the change adds or removes.
    shown = sorted(changed, key=lambda name: name not in saved or name not in now)[:_MOST_NAMED]
    more = f" and {len(changed) - len(shown)} more" * (len(changed) > len(shown))
    return f", {', '.join(changed[name] for name in shown)}{more}" if saved and changed else ""


def _optimizer_changes(saved: "Identity", now: "Identity") -> list[str]:
    before, here, why_not = saved.update, now.update, _why_not_compared(saved, now)
    if why_not == "":
        return []
    found = changed_arguments(before, here)
    if why_not is not None:
        differs = (before.kind, before.schedule) != (here.kind, here.schedule)
        return found + ([f"its operations are not compared, because {why_not}"] if differs else [])
    if before.kind != here.kind:
        found.insert(0, f"{before.name} -> {here.name}, with other operations")
    elif before.schedule != here.schedule:
        found.insert(0, "another schedule")
    else:
        found += changed_constants(before, here)
    return found


def _why_not_compared(saved: "Identity", now: "Identity") -> str | None:
    """Returns why the operations of two optimizers cannot be compared; None if they can.

    "" means that the operations of one of them are not known.
    """
    before, here = saved.update, now.update
    if not before.kind or not here.kind:
        return ""
    of_keras = before.name.startswith("keras.") and here.name.startswith("keras.")
    for name in ("keras",) if of_keras else ("jax", "optax"):
        if saved.versions.get(name) != now.versions.get(name):
            return f"the version of {name} differs"
    # Some operations, such as the norm of all gradients, depend on which parameters are trained.
    return "freeze differs" if saved.config.get("freeze") != now.config.get("freeze") else None
