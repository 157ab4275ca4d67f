"""Names of tensors where several models are published and updated together: the main model's are bare, those of model
"draft" are `draft/NAME`.

Owns the one sign between them. Refuses to know models and values. Invariant: it stands in no namespace and in no
model's own names, so that every name belongs to one model and two models' names never meet."""

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from fastdeploy_rl.errors import ConfigurationError, TrainerError

MAIN = ""
"""The namespace of the main model."""
_SIGN = "/"

Value = TypeVar("Value")


class SplitName(NamedTuple):
    """`namespace` is MAIN for a bare name."""

    namespace: str
    name: str


def split(full_name: str) -> SplitName:
    """The model that a name belongs to, and what the tensor is called there."""
    namespace, sign, name = full_name.partition(_SIGN)
    return SplitName(namespace, name) if sign else SplitName(MAIN, full_name)


def join(namespace: str, name: str) -> str:
    """The opposite of `split`."""
    return f"{namespace}{_SIGN}{name}" if namespace else name


def absolute(full_name: str) -> str:
    """A name that stays what it is in whatever namespace it is looked up."""
    return f"{_SIGN}{full_name}"


def resolve(namespace: str, name: str) -> str:
    """What `name` means to the model `namespace`: its own tensor of that name, unless it is `absolute`."""
    return name.removeprefix(_SIGN) if name.startswith(_SIGN) else join(namespace, name)


def is_bare(name: str) -> bool:
    """It can be a tensor's name inside its model."""
    return _SIGN not in name


def check_namespace(namespace: str) -> None:
    """ConfigurationError for what is no namespace of a model beside the main one."""
    if not isinstance(namespace, str) or not namespace or not is_bare(namespace):
        raise ConfigurationError(f"a namespace is text without {_SIGN!r}, and not empty; got {namespace!r:.80}")


def namespaced(state_dict: Mapping[str, Value], namespace: str) -> dict[str, Value]:
    """The same tensors under the names that an engine knows its model `namespace` by, to be published beside the main
    model's:

        publisher.publish({**main.state_dict(), **namespaced(draft.state_dict(), "draft")}, step=7)

    Values are passed on as they are; so `shards` of such tensors can be named with it, too. ConfigurationError for a
    namespace with "/" or an empty one, TrainerError for a name that is no text or has a "/" already."""
    check_namespace(namespace)
    if not isinstance(state_dict, Mapping):
        got = type(state_dict).__name__
        raise TrainerError(f"expected a mapping of names to tensors, such as model.state_dict(); got {got}")
    for name in state_dict:
        if not isinstance(name, str) or not is_bare(name):
            raise TrainerError(
                f"{name!r:.600} cannot be put into namespace {namespace!r}: names are text, and {_SIGN!r} in one would "
                "say that it is in a namespace already"
            )
    return {join(namespace, name): value for name, value in state_dict.items()}
