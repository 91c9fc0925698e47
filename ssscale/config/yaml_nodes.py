"""Limits the size of YAML texts before they are built."""

import yaml

MOST_NODES = 100_000  # values of a text after aliases are replaced


def check_nodes(text: str) -> None:
    """Raises YAMLError for anchors that contain themselves, or whose aliases expand to more than MOST_NODES values."""
    sizes: dict[int, int] = {}  # 0 while the children of a node are counted

    def count(node: yaml.Node) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = 0
            parts = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else []
            parts += node.value if isinstance(node, yaml.SequenceNode) else []
            sizes[id(node)] = 1 + sum(map(count, parts))
        if not 0 < sizes[id(node)] <= MOST_NODES:
            raise yaml.YAMLError("an anchor contains itself, or its aliases stand for too many values")
        return sizes[id(node)]

    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is not None:
        count(root)
