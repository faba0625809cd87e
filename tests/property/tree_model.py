"""A naive prefix tree: a flat map from every page-aligned prefix to its units, and brute force over it.

`Forest.of` reads a real tree into that form; `Forest.match` looks a prompt up by trying every length.
"""

from array import array

from holdfast.core.layout import Component, MemoryLayout
from holdfast.core.ledger import Hold
from holdfast.core.node import Node
from holdfast.core.prefix import PrefixTree

Path = tuple[int, ...]
Key = tuple[str, Path, str]


def unpack(packed: bytes) -> Path:
    """Tokens of a packed key."""
    return tuple(array("I", packed))


def path_of(node: Node) -> Path:
    """All tokens from the root to a node's end."""
    path: Path = ()
    while node.parent is not None:
        path = unpack(node.key) + path
        node = node.parent
    return path


def only(hold: Hold | None) -> int | None:
    """The unit of a Hold of one, or none."""
    return None if hold is None else hold.units[0]


class Forest:
    """What a tree has: `pages` maps (root, prefix, component name) to a unit; a page that has no unit of
    any component is still `there`. Tails are kept whole."""

    def __init__(self, layout: MemoryLayout) -> None:
        self.layout = layout
        self.there: set[tuple[str, Path]] = set()
        self.units: dict[Key, int] = {}
        self.tails: dict[tuple[str, Path], tuple[int | None, int | None, int | None]] = {}

    @classmethod
    def of(cls, tree: PrefixTree) -> "Forest":
        """The content of a real tree."""
        forest = cls(tree.layout)
        size = tree.layout.page_size
        for node in tree.forest.nodes():
            root, path = node.holder.name, path_of(node)
            for page in range(node.start // size, node.end // size):
                prefix = path[: (page + 1) * size]
                forest.there.add((root, prefix))
                if node.full is not None:
                    forest.units[root, prefix, "full"] = node.full.units[page - node.start // size]
                if node.window is not None and page >= node.window_first:
                    forest.units[root, prefix, "window"] = node.window.units[page - node.window_first]
            if node.state is not None:
                forest.units[root, path, "state"] = node.state.units[0]
            for tail in node.tails.values():
                held = (only(tail.full), only(tail.window), only(tail.state))
                forest.tails[root, path + unpack(tail.key)] = held
        return forest

    def same(self, other: "Forest") -> bool:
        """Whether both have the same pages, units and tails."""
        return (self.there, self.units, self.tails) == (other.there, other.units, other.tails)

    def contains(self, other: "Forest") -> bool:
        """Whether `other` has nothing that this one has not."""
        return (
            other.there <= self.there
            and other.units.items() <= self.units.items()
            and other.tails.items() <= self.tails.items()
        )

    def count(self, component: Component) -> int:
        """Units of one component, tails included."""
        name = component.name.lower()
        own = sum(kind == name for _, _, kind in self.units)
        return own + sum(held[component] is not None for held in self.tails.values())

    def resumable(self, root: str, path: Path) -> bool:
        """Whether every component can go on from the end of `path`."""
        size, layout = self.layout.page_size, self.layout
        aligned = len(path) // size * size
        for end in range(size, aligned + 1, size):
            if (root, path[:end]) not in self.there:
                return False
        if layout.window:
            for page in range(layout.window_first_page(len(path)), aligned // size):
                if (root, path[: (page + 1) * size], "window") not in self.units:
                    return False
        if len(path) > aligned:
            return (root, path) in self.tails
        return not layout.state or (root, path, "state") in self.units

    def ends(self) -> set[tuple[str, Path]]:
        """Everything that a look-up could resume from."""
        candidates = self.there | self.tails.keys()
        return {(root, path) for root, path in candidates if self.resumable(root, path)}

    def match(self, root: str, tokens: Path, limit: int) -> tuple[int, int]:
        """The longest resumable length, and how far the tree follows the tokens at all."""
        length = branch = 0
        for end in range(1, min(limit, len(tokens)) + 1):
            path = tokens[:end]
            if self.resumable(root, path):
                length = end
            if (root, path) in self.there or (root, path) in self.tails:
                branch = end
        return length, branch
