"""Recursive State Query: the stack of a depth-first walk."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvreclaim.eval.text.base import TextTask
from kvreclaim.eval.text.prose import ProseQuestion

DEFAULT_STEPS = 8
Graph = dict[int, list[int]]
_FIELD = r"{}\s*[:=]\s*\[([^\]]*)\]"
_CURRENT = re.compile(r"current\s*[:=]\s*(\d+)", re.IGNORECASE)

RULES = """\
You walk through an undirected graph, depth first. Keep a current node, a stack (the path from the start \
node to the current node, both included) and the list of visited nodes in the order of their first visit.
One step is:
- if the current node has unvisited neighbours, go to the smallest of them and push it on the stack;
- otherwise pop the current node from the stack and go back to the node that is then on top.

Neighbours of each node:
{neighbours}

You start at node {start}: current = {start}, stack = [{start}], visited = [{start}].
Take exactly {steps} steps. Write down current, stack and visited after every step. \
End with one line of this form:
FINAL current = <node>, stack = [<nodes>], visited = [<nodes>]"""


@dataclass(frozen=True)
class Walk:
    """State of a walk."""

    stack: tuple[int, ...]
    visited: tuple[int, ...]

    def step(self, graph: Graph) -> Walk:
        """Go to the smallest unvisited neighbour, else pop."""
        ahead = [node for node in graph[self.stack[-1]] if node not in self.visited]
        if ahead:
            return Walk((*self.stack, min(ahead)), (*self.visited, min(ahead)))
        return Walk(self.stack[:-1], self.visited)


@dataclass(frozen=True)
class TextRSQ(TextTask):
    """The state after `steps` steps of a depth-first walk; correct if the stack is exactly the walk's.

    The last stack in the answer counts; an answer without any is wrong. Graphs: a random tree of steps // 2 +
    3 nodes, which `steps` steps cannot finish, and half as many further edges.
    extra: parsed (an answer was found), current and visited (these were correct).
    Source: arXiv 2604.04921, Recursive State Query.
    """

    steps: int = DEFAULT_STEPS

    @property
    def name(self) -> str:
        return "rsq" if self.steps == DEFAULT_STEPS else f"rsq:{self.steps}"

    @property
    def identity(self) -> Mapping[str, Any]:
        return {**super().identity, "steps": self.steps}

    def write(self, rng: random.Random, index: int, num_sentences: int) -> ProseQuestion:
        graph = draw_graph(rng, self.steps // 2 + 3)
        start = rng.choice(sorted(graph))
        walk = Walk((start,), (start,))
        for _ in range(self.steps):
            walk = walk.step(graph)
        neighbours = "\n".join(f"{node}: {', '.join(map(str, graph[node]))}" for node in sorted(graph))
        text = RULES.format(neighbours=neighbours, start=start, steps=self.steps)
        return ProseQuestion(text, (_nodes(walk.stack), str(walk.stack[-1]), _nodes(walk.visited)))

    def mark(self, question: ProseQuestion, text: str) -> list[bool]:
        return [last_list(text, "stack") == question.answer[0]]

    def extra(self, question: ProseQuestion, text: str) -> Mapping[str, float]:
        current = _CURRENT.findall(text)
        return {
            "parsed": float(last_list(text, "stack") is not None),
            "current": float(bool(current) and current[-1] == question.answer[1]),
            "visited": float(last_list(text, "visited") == question.answer[2]),
        }


def draw_graph(rng: random.Random, num_nodes: int) -> Graph:
    """Connected and undirected; nodes 1 .. num_nodes, neighbours ascending."""
    order = rng.sample(range(1, num_nodes + 1), num_nodes)
    edges = {_edge(node, rng.choice(order[:i])) for i, node in enumerate(order) if i}
    for _ in range(num_nodes // 2):
        edges.add(_edge(*rng.sample(order, 2)))
    graph: Graph = {node: [] for node in order}
    for a, b in edges:
        graph[a].append(b)
        graph[b].append(a)
    return {node: sorted(others) for node, others in graph.items()}


def last_list(text: str, name: str) -> str | None:
    """Return the last `name = [1, 2]` of a text as "1 2"; None if there is none."""
    found = re.findall(_FIELD.format(name), text, re.IGNORECASE)
    return None if not found else " ".join(re.findall(r"\d+", found[-1]))


def _edge(a: int, b: int) -> tuple[int, int]:
    return min(a, b), max(a, b)


def _nodes(nodes: tuple[int, ...]) -> str:
    return " ".join(map(str, nodes))
