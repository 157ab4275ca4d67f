"""Names of tensors of several models."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_rl import namespaced
from fastdeploy_rl.errors import ConfigurationError, TrainerError
from fastdeploy_rl.plan.namespaces import MAIN, absolute, join, resolve, split

names = st.text(string.ascii_letters + "._-#0123456789é", min_size=1, max_size=8)


@given(names, names, names)
def test_every_name_belongs_to_one_model_and_names_of_two_never_meet(namespace: str, one: str, other: str) -> None:
    assert split(join(namespace, one)) == (namespace, one)
    assert split(join(MAIN, one)) == (MAIN, one)
    assert len({one, join(namespace, other), join(namespace + "x", other)}) == 3


@given(names, names, names)
def test_a_name_is_a_models_own_unless_it_is_absolute(namespace: str, other: str, name: str) -> None:
    assert resolve(namespace, name) == join(namespace, name)
    assert resolve(MAIN, name) == name
    for full_name in (name, join(other, name)):
        assert resolve(namespace, absolute(full_name)) == resolve(MAIN, absolute(full_name)) == full_name


def test_tensors_take_a_namespace_and_stay_the_objects_they_are() -> None:
    weight, norm = object(), object()
    state_dict = {"weight": weight, "norm": norm}
    moved = namespaced(state_dict, "draft")
    assert list(moved.items()) == [("draft/weight", weight), ("draft/norm", norm)]
    assert list(state_dict) == ["weight", "norm"]
    assert namespaced({}, "draft") == {}


@pytest.mark.parametrize("namespace", ["", "/", "draft/", "a/b", 7, None])
def test_what_is_no_namespace_is_refused(namespace: str) -> None:
    with pytest.raises(ConfigurationError, match="namespace"):
        namespaced({"norm": 1}, namespace)


@pytest.mark.parametrize("name", ["draft/norm", "/norm", "norm/", 7])
def test_a_name_that_is_in_a_namespace_already_is_refused(name: str) -> None:
    with pytest.raises(TrainerError, match="namespace 'draft'"):
        namespaced({"weight": 1, name: 2}, "draft")


def test_what_is_no_mapping_is_refused() -> None:
    with pytest.raises(TrainerError, match="state_dict"):
        namespaced([("norm", 1)], "draft")
