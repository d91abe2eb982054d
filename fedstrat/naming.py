"""The one place where Python's ``server_lr`` and Flower's ``server-lr`` turn into each other.

Dots, which separate the tables of a run config, stay as they are.
"""


def kebab(name: str) -> str:
    """Spell a Python name as in a run config: ``kebab("test_fraction") == "test-fraction"``."""
    return name.replace("_", "-")


def snake(name: str) -> str:
    """Spell a run-config name as in Python: ``snake("test-fraction") == "test_fraction"``."""
    return name.replace("-", "_")
