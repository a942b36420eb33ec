"""Command-line flags made from the fields of a pydantic model: their names, types and docstrings are written once."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

__all__ = ["add_flags", "given"]


def add_flags(
    parser: argparse.ArgumentParser, model: type[BaseModel], *, title: str, exclude: Collection[str] = ()
) -> None:
    """Add a flag for each field of `model`: top_p becomes --top-p, with the field's docstring as its help.

    Flags that are not given leave no trace in the namespace, so that the model's own defaults hold.
    """
    group = parser.add_argument_group(title)
    for name, field in model.model_fields.items():
        if name not in exclude:
            group.add_argument(
                f"--{name.replace('_', '-')}",
                dest=name,
                default=argparse.SUPPRESS,
                help=_help(field),
                **_kind(field.annotation, name),
            )


def given(args: argparse.Namespace, model: type[BaseModel]) -> dict[str, Any]:
    """The fields of `model` that were given as flags."""
    return {name: value for name, value in vars(args).items() if name in model.model_fields}


def _help(field: FieldInfo) -> str:
    text = (field.description or "").replace("%", "%%")
    default = field.default
    if default is PydanticUndefined or default is None or default is False:
        return text
    return f"{text} (default: {default})"


def _kind(annotation: Any, name: str) -> dict[str, Any]:
    """How argparse reads a field of this type."""
    if get_origin(annotation) in (Union, UnionType):
        (annotation,) = [part for part in get_args(annotation) if part is not NoneType][:1]
    origin = get_origin(annotation)
    metavar = name.upper()
    if annotation is bool:
        return {"action": argparse.BooleanOptionalAction}
    if origin is Literal:
        return {"choices": get_args(annotation)}
    if origin in (list, tuple):
        item = get_args(annotation)[0]
        return {"type": item, "nargs": "+", "metavar": metavar.removesuffix("S")}
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return {"type": json.loads, "metavar": "JSON"}
    return {"type": annotation, "metavar": metavar}
