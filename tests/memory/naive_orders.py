"""Slow twins of the eviction orders: lists that are searched and sorted anew for every question."""

from __future__ import annotations


class NaiveLRU:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
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

    def entered(self, block: int, priority: int) -> None:
        pass

    def used(self, block: int, priority: int) -> None:
        pass

    def forgot(self, block: int) -> None:
        pass


class NaivePriority(NaiveLRU):
    """What caches nothing first, then by the least number at its release, the highest first, then by
    release."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.numbers: dict[int, list[int]] = {}
        self.ranks: dict[int, int] = {}

    def sequence(self) -> list[int]:
        blank = [block for block in self.queued if block not in self.ranks]
        cached = [block for block in self.queued if block in self.ranks]
        return blank + sorted(cached, key=lambda block: self.ranks[block])

    def push(self, block: int) -> None:
        super().push(block)
        if block in self.numbers:
            self.ranks[block] = -min(self.numbers[block])

    def remove(self, block: int) -> None:
        super().remove(block)
        self.ranks.pop(block, None)

    def entered(self, block: int, priority: int) -> None:
        self.numbers[block] = [priority]

    def used(self, block: int, priority: int) -> None:
        self.numbers[block].append(priority)

    def forgot(self, block: int) -> None:
        del self.numbers[block]
        if block in self.ranks:
            self.remove(block)
            self.push(block)


class NaiveSLRU(NaiveLRU):
    """Three lists."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
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

    def entered(self, block: int, priority: int) -> None:
        self.caching.add(block)
        self.hit.discard(block)

    def used(self, block: int, priority: int) -> None:
        self.hit.add(block)

    def forgot(self, block: int) -> None:
        self.caching.discard(block)
        if block in self.queued:
            self.remove(block)
            self.push(block)


NAIVE = {"lru": NaiveLRU, "slru": NaiveSLRU, "priority": NaivePriority}
