"""Test what may be registered under a name that is taken."""

import pytest

from safer_tta._internal.registry import Registry
from safer_tta.errors import InvalidValueError


def test_only_a_cell_of_a_notebook_may_register_the_same_name_again():
    things: Registry[type] = Registry("thing")

    def run_cell(module: str, name: str = "Mine") -> type:
        return things.register("mine")(type(name, (), {"__module__": module}))

    run_cell("__main__")
    again = run_cell("__main__")
    assert things["mine"] is again
    for module, name in (("elsewhere", "Mine"), ("__main__", "Other")):
        with pytest.raises(InvalidValueError, match="thing 'mine' exists already"):
            run_cell(module, name)
    assert things["mine"] is again
