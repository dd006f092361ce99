"""Slow twins of the eviction orders: lists that are searched and sorted anew for every question."""

from __future__ import annotations


class NaiveLRU:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.queued = list(range(num_blocks))

    def sequence(self) -> list[int]:
        return list(self.queued)

    def take(self) -> int:
        block = self.sequence()[0]
        self.remove(block)
        return block

    def push(self, block: int) -> None:
        self.queued.append(block)

    def remove(self, block: int) -> None:
        self.queued.remove(block)

    def entered(self, block: int, parent: int | None, priority: int) -> None:
        pass

    def used(self, block: int, priority: int) -> None:
        pass

    def reused(self, block: int) -> None:
        self.forgot(block)

    def forgot(self, block: int) -> None:
        pass


class NaiveRanked(NaiveLRU):
    """What caches nothing first, then by rank, then by release."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.caching: set[int] = set()
        self.ranks: dict[int, float] = {}

    def rank(self, block: int) -> float:
        raise NotImplementedError

    def sequence(self) -> list[int]:
        blank = [block for block in self.queued if block not in self.ranks]
        cached = [block for block in self.queued if block in self.ranks]
        return blank + sorted(cached, key=lambda block: self.ranks[block])

    def push(self, block: int) -> None:
        super().push(block)
        if block in self.caching:
            self.ranks[block] = self.rank(block)

    def remove(self, block: int) -> None:
        super().remove(block)
        self.ranks.pop(block, None)

    def entered(self, block: int, parent: int | None, priority: int) -> None:
        self.caching.add(block)

    def forgot(self, block: int) -> None:
        self.caching.discard(block)
        if block in self.ranks:
            self.remove(block)
            self.push(block)


class NaiveLFU(NaiveRanked):
    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.uses = [0] * num_blocks

    def entered(self, block: int, parent: int | None, priority: int) -> None:
        super().entered(block, parent, priority)
        self.uses[block] = 1

    def used(self, block: int, priority: int) -> None:
        self.uses[block] += 1

    def rank(self, block: int) -> float:
        return self.uses[block]


class NaivePriority(NaiveRanked):
    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.numbers: dict[int, list[int]] = {}

    def entered(self, block: int, parent: int | None, priority: int) -> None:
        super().entered(block, parent, priority)
        self.numbers[block] = [priority]

    def used(self, block: int, priority: int) -> None:
        self.numbers[block].append(priority)

    def rank(self, block: int) -> float:
        return -min(self.numbers[block])


class NaiveGDSF(NaiveLFU):
    """Every content has a number; a rank is at least what any child of that content was queued with."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.age = 0.0
        self.queued_at: dict[int, float] = {}
        self.content = list(range(num_blocks))
        self.paths: list[tuple[int, ...]] = [(number,) for number in self.content]
        self.queued_with: list[tuple[tuple[int, ...], float]] = []

    def entered(self, block: int, parent: int | None, priority: int) -> None:
        super().entered(block, parent, priority)
        before = () if parent is None else self.paths[self.content[parent]]
        self.content[block] = len(self.paths)
        self.paths.append((*before, len(self.paths)))

    def rank(self, block: int) -> float:
        path = self.paths[self.content[block]]
        cost = 1 + (len(path) - 1) * self.block_size / 16_384
        own = self.age + self.uses[block] * cost
        rank = max([own, *(rank for below, rank in self.queued_with if below[:-1] == path)])
        self.queued_with.append((path, rank))
        return rank

    def push(self, block: int) -> None:
        super().push(block)
        self.queued_at[block] = self.ranks.get(block, 0.0)

    def reused(self, block: int) -> None:
        self.age = max(self.age, self.queued_at[block])
        super().reused(block)


class NaiveSLRU(NaiveLRU):
    """Three lists."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.blank, self.probation, self.protected = list(range(num_blocks)), [], []
        self.caching: set[int] = set()
        self.hit: set[int] = set()

    def sequence(self) -> list[int]:
        return self.blank + self.probation + self.protected

    def push(self, block: int) -> None:
        self.queued.append(block)
        if block not in self.caching:
            self.blank.append(block)
        elif block not in self.hit:
            self.probation.append(block)
        else:
            self.protected.append(block)
        while len(self.protected) > self.num_blocks // 5:
            demoted = self.protected.pop(0)
            self.hit.remove(demoted)
            self.probation.append(demoted)

    def remove(self, block: int) -> None:
        self.queued.remove(block)
        for segment in (self.blank, self.probation, self.protected):
            if block in segment:
                segment.remove(block)

    def entered(self, block: int, parent: int | None, priority: int) -> None:
        self.caching.add(block)
        self.hit.discard(block)

    def used(self, block: int, priority: int) -> None:
        self.hit.add(block)

    def forgot(self, block: int) -> None:
        self.caching.discard(block)
        if block in self.queued:
            self.remove(block)
            self.push(block)


NAIVE = {"lru": NaiveLRU, "slru": NaiveSLRU, "lfu": NaiveLFU, "priority": NaivePriority, "gdsf": NaiveGDSF}
