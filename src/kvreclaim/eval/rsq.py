"""Recursive State Query: a depth-first walk over a tree of facts that ends by stating its stack.

Source: the memory task of TriAttention, in the demo vocabulary. A fact `@ u a b END` lists the children
of u, and a leaf's is `@ u END`. The header `WALK t GO L8 r w .` names the target t and the root r. The trace
goes to the first listed child that was not visited, else back, until it reaches the target:

    `# u a filler .`     at u, down to its first child, or `# u END …` where it has none
    `< v ^ p a filler .` leave v for its parent p and go on to the child listed after v, or `< v ^ p END …`
                         where v was the last one
    `= t ^ p … ^ r`      the stack, from the target to the root, then `<eos>`

A node's parent stands right before it where the trace first reached it (and in the prompt, if it is a first
child). The stack is right or wrong as a whole.
"""

import random
from dataclasses import dataclass, field

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval import vocabulary as v
from kvreclaim.eval.example import (
    EvidencePlace,
    Example,
    SizedTask,
    TokenKind,
    TraceWriter,
    check_room,
    in_fact,
    in_header,
)

MAX_CHILDREN = 3
MAX_DEPTH = 12
GO_DEEPER = 0.55  # share of the nodes that hang on the node before them
NUM_LATEST = 6  # the target is the deepest of the last nodes that the trace has room for
HEADER_TOKENS = 7  # WALK t GO L r w .
ROOT = in_header(4)


@dataclass(frozen=True)
class RSQTask(SizedTask):
    """A walk over a tree.

    num_tokens:       of the document, exact
    num_nodes:        of the tree; those behind the target are never visited
    num_trace_tokens: at most
    """

    num_tokens: int
    num_nodes: int
    num_trace_tokens: int
    seeds = "rsq:"

    def __post_init__(self) -> None:
        """Refuse sizes that the vocabulary or the document can't hold."""
        super().__post_init__()
        if not 2 <= self.num_nodes <= v.NUM_NODES:
            raise InvalidArgumentError(f"num_nodes is {self.num_nodes}; it must be within 2..{v.NUM_NODES}")
        least = 2 * (6 + self.filler_words[1]) + 2 * MAX_DEPTH + 3
        if self.num_trace_tokens < least:
            raise InvalidArgumentError(
                f"num_trace_tokens is {self.num_trace_tokens}; with {self.filler_words[1]} filler words per "
                f"step it must be {least} or more"
            )
        check_room(self.num_tokens, self.num_trace_tokens + HEADER_TOKENS + 4 * self.num_nodes)

    def draw(self, rng: random.Random, num_filler: int) -> Example:
        tree = _draw_tree(rng, v.draw_nodes(rng, self.num_nodes))
        target = self._draw_target(tree, num_filler)
        word, follower = v.draw_word(rng), v.filler_cycle()
        header = [v.WALK, target, v.GO, v.FIRST_LENGTH + num_filler, tree.root, word, v.STOP]
        writer = TraceWriter(word, num_filler, follower)
        _Walk(tree, writer).run(target)
        facts = [(node, *children, v.END) for node, children in tree.children.items()]
        return self.assemble(rng, writer, facts, header, self.num_tokens)

    def _draw_target(self, tree: "_Tree", num_filler: int) -> int:
        """Return the deepest of the last nodes that the trace has room to walk to."""
        room = self.num_trace_tokens - 2 * MAX_DEPTH - 2
        reached: list[int] = []
        last = tree.root
        for node in tree.order[1:]:
            room -= 4 + num_filler  # down to node, or from the leaf before it to END
            if tree.parent[node] != last:
                room -= (tree.depth[last] - tree.depth[node] + 1) * (6 + num_filler)
            if room < 0:
                break
            reached.append(node)
            last = node
        return max(reached[-NUM_LATEST:], key=tree.depth.__getitem__)


@dataclass
class _Tree:
    """`order` is the order of first visits; each node is also a fact, in the order of `children`."""

    root: int
    children: dict[int, list[int]]
    parent: dict[int, int] = field(default_factory=dict)
    depth: dict[int, int] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)

    def visit(self, node: int, depth: int = 0) -> None:
        """Fill in parents, depths and order from here on."""
        self.depth[node] = depth
        self.order.append(node)
        for child in self.children[node]:
            self.parent[child] = node
            self.visit(child, depth + 1)


def _draw_tree(rng: random.Random, nodes: list[int]) -> _Tree:
    """Hang each node on the one before it or on any that has room."""
    children: dict[int, list[int]] = {nodes[0]: []}
    depth = {nodes[0]: 0}
    last = nodes[0]
    for node in nodes[1:]:
        open_nodes = [n for n, c in children.items() if len(c) < MAX_CHILDREN and depth[n] < MAX_DEPTH - 1]
        parent = last if last in open_nodes and rng.random() < GO_DEEPER else rng.choice(open_nodes)
        children[parent].append(node)
        children[node] = []
        depth[node] = depth[parent] + 1
        last = node
    tree = _Tree(nodes[0], children)
    tree.visit(nodes[0])
    return tree


class _Walk:
    """Writes the trace of one walk."""

    def __init__(self, tree: _Tree, writer: TraceWriter) -> None:
        self.tree = tree
        self.writer = writer
        self.numbers = {node: i for i, node in enumerate(tree.children)}
        self.above: dict[
            int, EvidencePlace
        ] = {}  # where the trace names a node's parent right before the node

    def run(self, target: int) -> None:
        """Walk from the root to the target, then state the stack."""
        node, place = self.tree.root, ROOT
        while node != target:
            node, place = self._descend(node, place)
        self.writer.add(v.STACK, TokenKind.MARK)
        self.writer.add(target, TokenKind.KEY, place)
        while node != self.tree.root:
            self.writer.add(v.PARENT, TokenKind.MARK)
            self.writer.add(self.tree.parent[node], TokenKind.STACK, self.above[node])
            node = self.tree.parent[node]

    def _descend(self, node: int, place: EvidencePlace) -> tuple[int, EvidencePlace]:
        """Write the step down from `node`, and the steps back after a leaf; return where they end."""
        children = self.tree.children[node]
        self.writer.add(v.FORWARD, TokenKind.MARK)
        place = self.writer.add(node, TokenKind.KEY, place)
        reached = children[0] if children else v.END
        reached_place = self.writer.add(reached, TokenKind.LOOKUP, in_fact(self.numbers[node], 2))
        self.writer.close_step()
        while reached == v.END:
            parent = self.tree.parent[node]
            siblings = [*self.tree.children[parent], v.END]
            index = siblings.index(node) + 1
            self.writer.add(v.BACKWARD, TokenKind.MARK)
            self.writer.add(node, TokenKind.KEY, place)
            self.writer.add(v.PARENT, TokenKind.MARK)
            place = self.writer.add(parent, TokenKind.RETURN, self.above[node])
            reached = siblings[index]
            fact = in_fact(self.numbers[parent], 2 + index)
            reached_place = self.writer.add(reached, TokenKind.SIBLING, fact)
            self.writer.close_step()
            node = parent
        self.above[reached] = place
        return reached, reached_place
