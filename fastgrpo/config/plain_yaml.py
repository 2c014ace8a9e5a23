"""Load YAML, but refuse keys given twice and aliases of lists and dictionaries.

A short file with aliases can describe a huge value.

PyYAML is imported with this module, so `recipe.py` imports it where a file is read.
"""

from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which refuses duplicate keys and aliases of lists and dictionaries."""

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            line = self.peek_event().start_mark.line + 1
            node = super().compose_node(parent, index)
            if isinstance(node, yaml.ScalarNode):
                return node
            raise ValueError(f"line {line} has an alias (*name) of a list or dictionary; repeat the value")
        return super().compose_node(parent, index)

    def construct_mapping(self, node, deep=False):
        mapping, lines = super().construct_mapping(node, deep), {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                raise ValueError(f"{name} is given twice, in lines {lines[name]} and {line}; delete one of them")
            lines[name] = line
        return mapping


def read_yaml(text: str) -> Any:
    """Read a YAML text."""
    try:
        loader = _Loader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except Exception as error:  # its constructors also raise KeyError, AttributeError and others for a value
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from None
