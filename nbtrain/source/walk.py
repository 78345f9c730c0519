"""Walk through your objects, the nearest first and each once, without running any of their code."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import FunctionType, MemberDescriptorType, MethodType
from typing import Any

from ..private.held_modules import module_dicts
from .user_code import is_kind, is_user, mro, own, state

MOST_OBJECTS, MOST_ITEMS = 10_000, 100_000  # of a walk, and of a container that it looks into
MANY = 256  # items of a container; more are alike, as the samples of a dataset are
PLAIN = (int, float, str, bool, type(None), complex, bytes)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
WRAPPERS: dict[type, tuple[str, ...]] = {
    MethodType: ("__func__", "__self__"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
    functools.cached_property: ("func",),
    functools.partial: ("func", "args", "keywords"),
    functools.partialmethod: ("func", "args", "keywords"),
}
_WRAPPERS = tuple(WRAPPERS)


def slots_of(kind: type) -> dict[str, Any]:
    """The slots of a class and its bases, by the names of their attributes: each reads, sets and deletes one of an object."""
    bodies = [own(base) for base in reversed(mro(kind)) if "__slots__" in own(base)]
    return {name: slot for body in bodies for name, slot in body.items() if type(slot) is MemberDescriptorType}


def attributes_of(item: Any) -> dict[str, Any]:
    """The attributes of an instance, in slots and in its `__dict__`."""
    found = {}
    for name, slot in slots_of(type(item)).items():
        with suppress(AttributeError):  # not set
            found[name] = slot.__get__(item)
    return found | state(item)


def base_of(item: Any) -> Any:
    """The kind of container that `item` is, whose methods read it without running those of a subclass; None for anything else."""
    kind = type(item)
    if kind in _CONTAINERS or not issubclass(kind, _CONTAINERS):
        return kind if kind in _CONTAINERS else None
    return next(base for base in mro(kind) if base in _CONTAINERS)


def values_of(item: Any) -> list[Any] | None:
    """The values of a dict, or the items of another container, none of a very long one; None for anything else."""
    base = base_of(item)
    if base is None:
        return None
    if base.__len__(item) > MOST_ITEMS:
        return []
    return list(dict.values(item) if base is dict else base.__iter__(item))


def few_of(items: list[Any]) -> list[Any]:
    """All items, or of many one of each class, and all functions and classes: the others are alike."""
    if len(items) <= MANY:
        return items
    return [*{id(one) if is_kind(one, (FunctionType, type, *WRAPPERS)) else type(one): one for one in items}.values()]


def parts(item: Any) -> list[Any]:
    """The items of a container, the functions in a wrapper of functions, or the values that an object holds."""
    values = values_of(item)
    if values is not None:
        return few_of(values)
    for kind, names in WRAPPERS.items() if is_kind(item, _WRAPPERS) else ():
        if is_kind(item, kind):
            return [object.__getattribute__(item, name) for name in names]
    # The private attributes of a library's objects lead everywhere; but a torch module keeps its layers in one
    private, named = is_user(type(item)), (module_dicts()[0], "__wrapped__")
    return [value for name, value in attributes_of(item).items() if private or name[0] != "_" or name in named]


def function_of(item: Any) -> Any:
    """The function in a property, a method, a static or a class method; anything else as it is."""
    for kind, names in WRAPPERS.items():
        if is_kind(item, kind) and names[0] in ("fget", "__func__"):
            return object.__getattribute__(item, names[0])
    return item


def method_of(item: Any, name: str) -> Any:
    """The method `name` of an object; None if it has none, or answers any name, as a mock does."""
    try:
        found = getattr(item, name, None)
        return found if callable(found) and not hasattr(item, "nbtrain_asks_for_any_name") else None
    except Exception:  # of the object's own code
        return None


class Walk:
    """Yields objects and their paths; `visit` adds what an object holds. An object that can't be read is a leaf.

    `known`: the ids of objects that are left out. `is_whole`: False if there were more than 10,000.
    """

    leaves: tuple[type, ...] = PLAIN

    def __init__(self, known: Iterable[int] = ()) -> None:
        self.seen: dict[int, Any] = dict.fromkeys(known)  # holds each object, so that no id is used again
        self.queue: deque[tuple[str, Any]] = deque()
        self.unread: list[Any] = []
        self.is_whole, self._most = True, len(self.seen) + MOST_OBJECTS

    def add(self, item: Any, path: str = "") -> None:
        """Walk to `item` too, once."""
        if id(item) in self.seen or issubclass(type(item), self.leaves):
            return
        self.is_whole = self.is_whole and len(self.seen) < self._most
        if self.is_whole:
            self.seen[id(item)] = item
            self.queue.append((path, item))

    def visit(self, item: Any, path: str) -> None:
        """Add what `item` holds."""
        for value in parts(item):
            self.add(value, path)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        while self.queue:
            path, item = self.queue.popleft()
            yield path, item
            try:
                self.visit(item, path)
            except Exception:  # whatever an odd object raises
                self.unread.append(item)
