"""What a worker that fails says last: one line, the class of the error, and no page of somebody's C++."""

from fastdeploy_rl.engines.embedded.messages import Failed
from fastdeploy_rl.engines.embedded.worker import MAX_REASON, last_words
from fastdeploy_rl.errors import CheckpointError

PADDLE = """

--------------------------------------
C++ Traceback (most recent call last):
--------------------------------------
0   paddle::memory::allocation::AllocatorFacade::Alloc(...)

----------------------
Error Message Summary:
----------------------
ResourceExhaustedError:

Out of memory. Cannot allocate 8 GB.
  [Hint: fewer pages.] (at alloc.cc:95)
"""


def test_an_error_of_the_tree_keeps_its_class() -> None:
    assert last_words(1, CheckpointError("model.safetensors:\n truncated")) == Failed(
        1, "CheckpointError", "model.safetensors: truncated"
    )


def test_a_foreign_error_is_the_engines_and_names_its_own_class() -> None:
    assert last_words(0, ValueError("bad")) == Failed(0, "EngineError", "ValueError: bad")
    assert last_words(0, ValueError()).message == "ValueError:"


def test_of_paddles_errors_the_summary_is_told() -> None:
    assert last_words(0, OSError(PADDLE)).message == (
        "OSError: ResourceExhaustedError: Out of memory. Cannot allocate 8 GB. [Hint: fewer pages.] (at alloc.cc:95)"
    )


def test_a_reason_is_bounded() -> None:
    assert len(last_words(0, ValueError("x" * 100_000)).message) < MAX_REASON + 10
